/* Dense rows of a sparse matrix: each row is cleared and filled while a processor's cache holds it. */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

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

/* A sparse matrix. Entries `starts[i]` to `starts[i + 1]` are those of row i. The value of an entry is `table[code]`, with
 * codes of one byte; or the code itself, without a table; or `table[0]`, without codes. */
typedef struct {
    const int64_t *starts;
    const void *columns, *codes, *table;
    int64_t num_columns;
    int32_t column_bytes, value_bytes;
} Matrix;

/* The sizes are constants wherever this is used, so that a compiler makes a loop of its own for each. */
INLINE int fill(const Matrix *matrix, const int64_t *rows, int64_t count, uint8_t *out, int column_bytes,
                int value_bytes) {
    size_t row_bytes = (size_t)matrix->num_columns * (size_t)value_bytes;
    uint64_t constant = matrix->codes ? 0 : load(matrix->table, 0, value_bytes);
    for (int64_t i = 0; i < count; i++, out += row_bytes) {
        memset(out, 0, row_bytes);
        for (int64_t entry = matrix->starts[rows[i]]; entry < matrix->starts[rows[i] + 1]; entry++) {
            uint64_t column = load(matrix->columns, entry, column_bytes), value = constant;
            if (column >= (uint64_t)matrix->num_columns) return -1;
            if (matrix->codes && matrix->table)
                value = load(matrix->table, ((const uint8_t *)matrix->codes)[entry], value_bytes);
            else if (matrix->codes) value = load(matrix->codes, entry, value_bytes);
            store(out, column, value_bytes, value);
        }
    }
    return 0;
}

INLINE int fill_columns(const Matrix *matrix, const int64_t *rows, int64_t count, uint8_t *out, int value_bytes) {
    switch (matrix->column_bytes) {
        case 1: return fill(matrix, rows, count, out, 1, value_bytes);
        case 2: return fill(matrix, rows, count, out, 2, value_bytes);
        case 4: return fill(matrix, rows, count, out, 4, value_bytes);
        default: return fill(matrix, rows, count, out, 8, value_bytes);
    }
}

/* Make `count` rows dense: 0, or -1 if a column is not one of the matrix. */
EXPORT int h5chunk_dense(const Matrix *matrix, const int64_t *rows, int64_t count, void *out) {
    switch (matrix->value_bytes) {
        case 1: return fill_columns(matrix, rows, count, out, 1);
        case 2: return fill_columns(matrix, rows, count, out, 2);
        case 4: return fill_columns(matrix, rows, count, out, 4);
        default: return fill_columns(matrix, rows, count, out, 8);
    }
}
