/* Copy rows of a sparse matrix in any order, with other integer types, or make them dense. */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { AHEAD_ROWS = 4, AHEAD_BYTES = 2048, PROBE_BYTES = 64, PROBE_STEP = 40503 };

INLINE uint64_t load(const void *array, int64_t index, int num_bytes) {
    switch (num_bytes) {
        case 1: return ((const uint8_t *)array)[index];
        case 2: return ((const uint16_t *)array)[index];
        case 4: return ((const uint32_t *)array)[index];
        default: return ((const uint64_t *)array)[index];
    }
}

INLINE void store(void *array, uint64_t index, int num_bytes, uint64_t value) {
    switch (num_bytes) {
        case 1: ((uint8_t *)array)[index] = (uint8_t)value; break;
        case 2: ((uint16_t *)array)[index] = (uint16_t)value; break;
        case 4: ((uint32_t *)array)[index] = (uint32_t)value; break;
        default: ((uint64_t *)array)[index] = value;
    }
}

/* A sparse matrix. Row i has the entries `starts[i]` to `starts[i + 1]`. The value of an entry is `table[code]`, with
 * codes of one byte; without a table, the code itself; without codes, `table[0]`. */
typedef struct {
    const int64_t *starts;
    const void *columns, *codes, *table;
    int64_t num_columns;
    int32_t column_bytes, value_bytes;
} Matrix;

/* Begin to load bytes, at most `AHEAD_BYTES`, into the cache. */
INLINE void prefetch(const uint8_t *from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes && i < AHEAD_BYTES; i += 64) __builtin_prefetch(from + i);
}

INLINE void prefetch_row(const Matrix *matrix, int64_t row) {
    int64_t first = matrix->starts[row], count = matrix->starts[row + 1] - first;
    int code_bytes = matrix->table ? 1 : matrix->value_bytes;
    prefetch((const uint8_t *)matrix->columns + first * matrix->column_bytes, count * matrix->column_bytes);
    if (matrix->codes) prefetch((const uint8_t *)matrix->codes + first * code_bytes, count * code_bytes);
}

/* Clear a row: only what the previous filling of this row has set, if `set` says that. `set[0]` is the number of columns
 * that follow it, or -1. A part of the row, another one for each row, is looked at to see whether others have written. */
INLINE void clear(uint8_t *out, size_t row_bytes, const int32_t *set, int64_t row, int value_bytes) {
    uint64_t probes[PROBE_BYTES / 8] = {0}, found = 0;
    if (!set || set[0] < 0 || row_bytes < sizeof probes) {
        memset(out, 0, row_bytes);
        return;
    }
    for (int32_t i = 1; i <= set[0]; i++) store(out, (uint64_t)set[i], value_bytes, 0);
    memcpy(probes, out + (uint64_t)row * PROBE_STEP % (row_bytes - sizeof probes + 1), sizeof probes);
    for (int i = 0; i < PROBE_BYTES / 8; i++) found |= probes[i];
    if (found) memset(out, 0, row_bytes);
}

/* All callers pass constant sizes, so the compiler generates a separate loop for each size. */
INLINE int fill(const Matrix *matrix, const int64_t *rows, int64_t count, uint8_t *out, int32_t *set, int64_t most_set,
                int column_bytes, int value_bytes) {
    size_t row_bytes = (size_t)matrix->num_columns * (size_t)value_bytes;
    uint64_t constant = matrix->codes ? 0 : load(matrix->table, 0, value_bytes);
    for (int64_t i = 0; i < count; i++, out += row_bytes, set = set ? set + 1 + most_set : NULL) {
        int64_t first = matrix->starts[rows[i]], end = matrix->starts[rows[i] + 1];
        clear(out, row_bytes, set, rows[i], value_bytes);
        if (set) set[0] = -1;
        if (i + 1 < count) prefetch_row(matrix, rows[i + 1]);
        for (int64_t entry = first; entry < end; entry++) {
            uint64_t column = load(matrix->columns, entry, column_bytes), value = constant;
            if (column >= (uint64_t)matrix->num_columns) return -1;
            if (matrix->codes && matrix->table)
                value = load(matrix->table, ((const uint8_t *)matrix->codes)[entry], value_bytes);
            else if (matrix->codes) value = load(matrix->codes, entry, value_bytes);
            store(out, column, value_bytes, value);
        }
        if (!set || end - first > most_set) continue;
        for (int64_t entry = first; entry < end; entry++)
            set[1 + entry - first] = (int32_t)load(matrix->columns, entry, column_bytes);
        set[0] = (int32_t)(end - first);
    }
    return 0;
}

INLINE int fill_columns(const Matrix *matrix, const int64_t *rows, int64_t count, uint8_t *out, int32_t *set,
                        int64_t most_set, int value_bytes) {
    switch (matrix->column_bytes) {
        case 1: return fill(matrix, rows, count, out, set, most_set, 1, value_bytes);
        case 2: return fill(matrix, rows, count, out, set, most_set, 2, value_bytes);
        case 4: return fill(matrix, rows, count, out, set, most_set, 4, value_bytes);
        default: return fill(matrix, rows, count, out, set, most_set, 8, value_bytes);
    }
}

/* Make `count` rows dense. Returns 0, or -1 if a column is outside of the matrix. If `set` is not NULL, it has 1 + `most_set`
 * numbers for each row of `out`: the number of columns that are not 0, or -1 if that is unknown, and these columns. */
EXPORT int h5chunk_dense(const Matrix *matrix, const int64_t *rows, int64_t count, void *out, int32_t *set,
                         int64_t most_set) {
    switch (matrix->value_bytes) {
        case 1: return fill_columns(matrix, rows, count, out, set, most_set, 1);
        case 2: return fill_columns(matrix, rows, count, out, set, most_set, 2);
        case 4: return fill_columns(matrix, rows, count, out, set, most_set, 4);
        default: return fill_columns(matrix, rows, count, out, set, most_set, 8);
    }
}

/* Convert integers to another unsigned type. */
static void convert(const uint8_t *from, int from_bytes, void *to, int to_bytes, int64_t count) {
#define CONVERT(from_size, to_size) \
    if (from_bytes == from_size && to_bytes == to_size) \
        for (int64_t i = 0; i < count; i++) store(to, (uint64_t)i, to_size, load(from, i, from_size))
    if (from_bytes == to_bytes) memcpy(to, from, (size_t)(count * to_bytes));
    CONVERT(1, 4);
    CONVERT(2, 4);
    CONVERT(8, 4);
    CONVERT(1, 8);
    CONVERT(2, 8);
    CONVERT(4, 8);
}

/* Write the values of `count` entries from `first` on. */
static void copy_values(const Matrix *matrix, int64_t first, int64_t count, void *out) {
    int size = matrix->value_bytes;
    const uint8_t *codes = matrix->codes ? (const uint8_t *)matrix->codes + first * (matrix->table ? 1 : size) : NULL;
    if (codes && !matrix->table) memcpy(out, codes, (size_t)(count * size));
    else if (codes && size == 4)
        for (int64_t i = 0; i < count; i++) ((uint32_t *)out)[i] = ((const uint32_t *)matrix->table)[codes[i]];
    else
        for (int64_t i = 0; i < count; i++)
            store(out, (uint64_t)i, size, load(matrix->table, codes ? codes[i] : 0, size));
}

/* Concatenate the entries of `count` rows: columns as integers of `index_bytes`, 4 or 8, and values. Row i begins at
 * `starts[i]`, which also has `index_bytes`. */
EXPORT void h5chunk_entries(const Matrix *matrix, const int64_t *rows, int64_t count, int32_t index_bytes, void *starts,
                            uint8_t *columns, uint8_t *values) {
    int64_t num_copied = 0;
    store(starts, 0, index_bytes, 0);
    for (int64_t i = 0; i < count;) {
        int64_t first = matrix->starts[rows[i]], end = first, begun = i;
        if (i + AHEAD_ROWS < count) prefetch_row(matrix, rows[i + AHEAD_ROWS]);
        do { /* consecutive rows share one copy */
            end = matrix->starts[rows[i] + 1];
            store(starts, (uint64_t)++i, index_bytes, (uint64_t)(num_copied + end - first));
        } while (i < count && rows[i] == rows[begun] + i - begun);
        if (end == first) continue; /* without entries, the arrays may be NULL */
        const uint8_t *from = (const uint8_t *)matrix->columns + first * matrix->column_bytes;
        convert(from, matrix->column_bytes, columns + num_copied * index_bytes, index_bytes, end - first);
        copy_values(matrix, first, end - first, values + num_copied * matrix->value_bytes);
        num_copied += end - first;
    }
}

/* ---- Boxes of arrays ---- */

enum { MAX_AXES = 32, AHEAD_RUNS = 8, AHEAD_OF_RUN = 512 };

/* Copy `slabs` * `rows` * `items` items of a type, at any addresses, which takes a fifth of the time of calls of memcpy.
 * All numbers are local variables, because the compiler must assume that a write of bytes changes arrays of numbers. */
#define COPY_ITEMS(type)                                                                                               \
    for (int64_t k = 0; k < slabs; k++, from += from_slab, to += to_slab)                                              \
        for (int64_t i = 0; i < rows; i++)                                                                             \
            _Pragma("GCC unroll 4") for (int64_t j = 0; j < items; j++) {                                              \
                type item;                                                                                             \
                memcpy(&item, from + i * from_row + j * from_item, sizeof item);                                       \
                memcpy(to + i * to_row + j * to_item, &item, sizeof item);                                             \
            }

/* Copy `*lengths` runs of a constant length, which takes half of the time of calls of memcpy. */
#define COPY_RUNS(bytes)                                                                                               \
    {                                                                                                                  \
        for (int64_t i = 0; i < *lengths; i++, from += *from_steps, to += *to_steps) memcpy(to, from, bytes);          \
        return;                                                                                                        \
    }

/* Copy `lengths[0]` * ... * `lengths[axes - 1]` runs. The steps of both arrays are in bytes. */
static void copy_runs(const uint8_t *from, const int64_t *from_steps, uint8_t *to, const int64_t *to_steps,
                      const int64_t *lengths, int64_t axes, size_t run) {
    if (!axes) {
        memcpy(to, from, run);
        return;
    }
    if ((axes == 2 || axes == 3) && (run == 1 || run == 2 || run == 4 || run == 8)) {
        const int64_t slabs = axes == 3 ? lengths[0] : 1, from_slab = from_steps[0], to_slab = to_steps[0];
        const int64_t rows = lengths[axes - 2], from_row = from_steps[axes - 2], to_row = to_steps[axes - 2];
        const int64_t items = lengths[axes - 1], from_item = from_steps[axes - 1], to_item = to_steps[axes - 1];
        if (run == 1) COPY_ITEMS(uint8_t)
        else if (run == 2) COPY_ITEMS(uint16_t)
        else if (run == 4) COPY_ITEMS(uint32_t)
        else COPY_ITEMS(uint64_t)
        return;
    }
    if (axes == 1 && run == 8) COPY_RUNS(8)
    if (axes == 1 && run == 16) COPY_RUNS(16)
    if (axes == 1 && run == 32) COPY_RUNS(32)
    for (int64_t i = 0; i < *lengths; i++, from += *from_steps, to += *to_steps) {
        if (axes > 1) {
            copy_runs(from, from_steps + 1, to, to_steps + 1, lengths + 1, axes - 1, run);
            continue;
        }
        for (size_t byte = 0; i + AHEAD_RUNS < *lengths && byte < run && byte < AHEAD_OF_RUN; byte += 64)
            __builtin_prefetch(to + AHEAD_RUNS * *to_steps + byte, 1);
        memcpy(to, from, run);
    }
}

/* Copy boxes of an array to elements of another one, which has one more axis, the first. A row of `boxes` has the index
 * along that axis, and then, for all other axes each, the first indices in `from`, the first indices in `to`, and the
 * lengths. */
EXPORT void h5chunk_copy_boxes(const uint8_t *from, const int64_t *from_shape, int64_t axes, int64_t item_bytes,
                               const int64_t *boxes, int64_t count, uint8_t *to, const int64_t *to_shape) {
    int64_t from_steps[MAX_AXES], to_steps[MAX_AXES], from_step = item_bytes, to_step = item_bytes;
    for (int64_t axis = axes; axis--;) {
        from_steps[axis] = from_step;
        to_steps[axis] = to_step;
        from_step *= from_shape[axis];
        to_step *= to_shape[axis];
    }
    for (; count--; boxes += 1 + 3 * axes) {
        const int64_t *first = boxes + 1, *place = first + axes, *lengths = place + axes;
        const uint8_t *source = from;
        uint8_t *target = to + *boxes * to_step;
        for (int64_t axis = 0; axis < axes; axis++) {
            source += first[axis] * from_steps[axis];
            target += place[axis] * to_steps[axis];
        }
        int64_t outer = axes, skipped = 0;
        int64_t run = item_bytes;
        while (outer && run == from_steps[outer - 1] && run == to_steps[outer - 1]) run *= lengths[--outer];
        while (skipped < outer && lengths[skipped] == 1) skipped++;
        copy_runs(source, from_steps + skipped, target, to_steps + skipped, lengths + skipped, outer - skipped,
                  (size_t)run);
    }
}
