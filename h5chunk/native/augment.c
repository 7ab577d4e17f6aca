/* Crop, resize, pad, flip, erase, normalise and cast images one after another. h5chunk/transforms/pixels.py
 * describes the arithmetic. */
#include <stdlib.h>
#include <string.h>

#include "augment.h"

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default"))) /* selected at load time */
#define CLONES_WITHOUT_FMA __attribute__((target_clones("avx2", "default"))) /* rounds products before sums */
#else
#define CLONES
#define CLONES_WITHOUT_FMA
#endif

enum { ANTIALIAS = 0, BILINEAR = 1, NEAREST = 2 };
enum { CONSTANT = 0, REFLECT = 1, EDGE = 2 };
enum { LOOKED_UP = 0, SAME = 1, FLOAT32 = 2, BFLOAT16 = 3 }; /* how a byte is converted to a result */
enum { MOST_CHANNELS = 256 };
enum { WEIGHT_BITS = 22, HALF = 1 << (WEIGHT_BITS - 1), LANES = 16 };

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES))); /* GCC converts to twice or half the size well */
typedef int32_t Words __attribute__((vector_size(4 * LANES)));

/* The pixels along a side that contribute to each result: `taps` pixels from `first` on, with the weights from
 * `weights[result * most]` on. */
typedef struct {
    int32_t *first, *taps, *weights;
    int64_t most;
} Side;

/* ---- Positions and weights ---- */

/* Map `count` results, starting at `first`, to pixels along a side of `length`. -1 marks results to fill. */
static void map_positions(int32_t *positions, int64_t count, int64_t first, int64_t length, int mode, int flip) {
    for (int64_t i = 0; i < count; i++) {
        int64_t position = first + (flip ? count - 1 - i : i);
        if (mode == REFLECT) {
            if (position < 0) position = -position;
            if (position >= length) position = 2 * (length - 1) - position;
        }
        int outside = position < 0 || position >= length;
        if (outside) position = mode == CONSTANT ? -1 : position < 0 ? 0 : length - 1;
        positions[i] = (int32_t)position;
    }
}

/* Compute the weights of the pixels along a side of `length` that is resized to `full`, for the results at `positions`.
 * Returns -1 if memory is short. */
static int weigh(Side *side, Room *room, const int32_t *positions, int64_t count, int64_t length, int64_t full,
                 int kind) {
    int64_t reach = 2 * (kind == ANTIALIAS && length > full ? length : full);
    side->most = kind == NEAREST ? 1 : reach / full + 2;
    side->first = take(room, (size_t)(count * (2 + side->most)) * sizeof(int32_t));
    if (!side->first) return -1;
    side->taps = side->first + count;
    side->weights = side->taps + count;
    for (int64_t i = 0; i < count; i++) {
        int32_t *weights = side->weights + i * side->most;
        int64_t middle = (2 * (int64_t)(positions[i] < 0 ? 0 : positions[i]) + 1) * length;
        int64_t pixel = middle / (2 * full), sum = 0;
        int32_t taps = 1;
        if (kind == NEAREST) weights[0] = 1 << WEIGHT_BITS;
        else {
            pixel = middle > reach ? (middle - reach) / (2 * full) : 0;
            while ((2 * pixel + 1) * full <= middle - reach) pixel++;
            for (taps = 0; pixel + taps < length && (2 * (pixel + taps) + 1) * full < middle + reach; taps++) {
                int64_t distance = (2 * (pixel + taps) + 1) * full - middle;
                weights[taps] = (int32_t)(reach - (distance < 0 ? -distance : distance));
                sum += weights[taps];
            }
            for (int32_t tap = 0; tap < taps; tap++)
                weights[tap] = (int32_t)((((int64_t)weights[tap] << (WEIGHT_BITS + 1)) + sum) / (2 * sum));
        }
        side->first[i] = (int32_t)pixel;
        side->taps[i] = taps;
    }
    return 0;
}

/* ---- Resizing ---- */

/* Combine 16 bytes of `taps` rows that are `stride` apart. */
INLINE void combine(uint8_t *to, const uint8_t *from, int64_t stride, const int32_t *weights, int32_t taps) {
    Words sum = {0};
    Bytes bytes;
    sum += HALF;
    for (int32_t tap = 0; tap < taps; tap++, from += stride) {
        memcpy(&bytes, from, LANES);
        sum += __builtin_convertvector(__builtin_convertvector(bytes, Halves), Words) * weights[tap];
    }
    bytes = __builtin_convertvector(__builtin_convertvector(sum >> WEIGHT_BITS, Halves), Bytes);
    memcpy(to, &bytes, LANES);
}

/* Combine rows to one row of `count` bytes. Up to 15 bytes are read past the rows, and written past the result. */
CLONES static void resize_down(uint8_t *to, const uint8_t *from, int64_t stride, const int32_t *weights, int32_t taps,
                               int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) combine(to + i, from + i, stride, weights, taps);
}

#if defined(__clang__)
#define INTERLEAVE(a, b, high)                                                                                       \
    ((high) ? __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)              \
            : __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23))
#else
#define INTERLEAVE(a, b, high)                                                                                       \
    ((high) ? __builtin_shuffle(a, b, (Bytes){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31})           \
            : __builtin_shuffle(a, b, (Bytes){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}))
#endif

/* Transpose 16 x 16 bytes by interleaving rows i and i + 8 four times. */
INLINE void transpose(uint8_t *to, int64_t to_stride, const uint8_t *const *from, int64_t offset) {
    Bytes rows[LANES], next[LANES];
    for (int i = 0; i < LANES; i++) memcpy(rows + i, from[i] + offset, LANES);
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = INTERLEAVE(rows[i], rows[i + LANES / 2], 0);
            next[2 * i + 1] = INTERLEAVE(rows[i], rows[i + LANES / 2], 1);
        }
        memcpy(rows, next, sizeof rows);
    }
    for (int i = 0; i < LANES; i++) memcpy(to + i * to_stride, rows + i, LANES);
}

/* Resize 16 rows of `length` bytes along the rows, by transposing them; `sideways` has space for the transposed rows and
 * results. `to` has 16 rows; up to 15 bytes are written past each row. */
CLONES static void resize_across(uint8_t *const *to, const uint8_t *const *from, int64_t length, const Side *side,
                                 int64_t count, int64_t channels, uint8_t *sideways) {
    int64_t whole = length / LANES * LANES, size = count * channels;
    for (int64_t i = 0; i < whole; i += LANES) transpose(sideways + i * LANES, LANES, from, i);
    if (whole < length) {
        uint8_t ends[LANES][LANES] = {{0}};
        const uint8_t *rows[LANES];
        for (int i = 0; i < LANES; i++) memcpy(ends[i], from[i] + whole, (size_t)(length - whole)), rows[i] = ends[i];
        transpose(sideways + whole * LANES, LANES, rows, 0);
    }
    uint8_t *results = sideways + (whole + LANES) * LANES;
    for (int64_t i = 0; i < count; i++)
        for (int64_t channel = 0; channel < channels; channel++)
            combine(results + (i * channels + channel) * LANES,
                    sideways + ((int64_t)side->first[i] * channels + channel) * LANES, channels * LANES,
                    side->weights + i * side->most, side->taps[i]);
    for (int64_t i = 0; i < size; i += LANES) {
        const uint8_t *rows[LANES];
        uint8_t back[LANES * LANES];
        for (int row = 0; row < LANES; row++) rows[row] = results + (i + row) * LANES;
        transpose(back, LANES, rows, 0);
        for (int row = 0; row < LANES; row++) memcpy(to[row] + i, back + row * LANES, LANES);
    }
}

/* ---- Conversion of a row ---- */

CLONES_WITHOUT_FMA static void to_float32(float *to, const uint8_t *from, const float *scale, const float *shift,
                                          int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float product = (float)from[i] * scale[i];
        to[i] = product + shift[i];
    }
}

CLONES_WITHOUT_FMA static void to_bfloat16(uint16_t *to, const uint8_t *from, const float *scale, const float *shift,
                                           int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        union {
            float number;
            uint32_t bits;
        } sum = {(float)from[i] * scale[i]};
        sum.number += shift[i];
        to[i] = (uint16_t)((sum.bits + 0x7FFF + (sum.bits >> 16 & 1)) >> 16);
    }
}

#define LOOK_UP(type)                                                                       \
    do {                                                                                    \
        const type *values = rule->values;                                                  \
        type *results = to;                                                                 \
        for (int64_t i = 0; i < count; i += step)                                           \
            for (int64_t c = 0; c < step; c++)                                              \
                results[i + c] = values[(channel + c) * 256 + from[i + c]];                 \
    } while (0)

/* Convert `count` bytes of one channel, or of interleaved channels if `step` is their number. */
static void convert(const Rule *rule, void *to, const uint8_t *from, int64_t count, int64_t channel, int64_t step) {
    const float *scale = rule->scale + channel * rule->width, *shift = rule->shift + channel * rule->width;
    if (rule->conversion == SAME) memcpy(to, from, (size_t)count);
    else if (rule->conversion == FLOAT32) to_float32(to, from, scale, shift, count);
    else if (rule->conversion == BFLOAT16) to_bfloat16(to, from, scale, shift, count);
    else if (rule->item_bytes == 1) LOOK_UP(uint8_t);
    else if (rule->item_bytes == 2) LOOK_UP(uint16_t);
    else if (rule->item_bytes == 4) LOOK_UP(uint32_t);
    else LOOK_UP(uint64_t);
}

INLINE void regroup(uint8_t *to, const uint8_t *from, int64_t outer, int64_t inner) {
    for (int64_t i = 0; i < outer; i++)
        for (int64_t j = 0; j < inner; j++) to[j * outer + i] = from[i * inner + j];
}

/* Transpose `outer` x `inner` bytes, from planar to interleaved rows or the reverse. */
CLONES static void transpose_row(uint8_t *to, const uint8_t *from, int64_t outer, int64_t inner) {
    if (inner == 3) regroup(to, from, outer, 3);
    else if (outer == 3) regroup(to, from, 3, inner);
    else regroup(to, from, outer, inner);
}

/* Distribute `count` interleaved pixels to three planes. */
CLONES static void split_row(uint8_t *to, int64_t plane_bytes, const uint8_t *from, int64_t count) {
    uint8_t *second = to + plane_bytes, *third = second + plane_bytes;
    for (int64_t i = 0; i < count; i++) to[i] = from[3 * i], second[i] = from[3 * i + 1], third[i] = from[3 * i + 2];
}

/* Write row `number` of a result from `rows`, which are planar or interleaved like the source. */
static void write_row(const Rule *rule, uint8_t *out, int64_t number, const uint8_t *const *rows, uint8_t *spare) {
    int64_t width = rule->width, channels = rule->channels, item = rule->item_bytes, size = width * channels;
    if (rule->out_interleaved) {
        const uint8_t *row = rows[0];
        if (!rule->interleaved && channels > 1) {
            for (int64_t c = 0; c < channels; c++) memcpy(spare + size + c * width, rows[c], (size_t)width);
            transpose_row(spare, spare + size, channels, width);
            row = spare;
        }
        convert(rule, out + number * size * item, row, size, 0, channels);
        return;
    }
    if (rule->interleaved && channels == 3 && rule->conversion == SAME) {
        split_row(out + number * width, rule->height * width, rows[0], width);
        return;
    }
    if (rule->interleaved && channels > 1) transpose_row(spare, rows[0], width, channels);
    for (int64_t c = 0; c < channels; c++) {
        const uint8_t *row = rule->interleaved && channels > 1 ? spare + c * width : rows[c];
        convert(rule, out + (c * rule->height + number) * width * item, row, width, c, 1);
    }
}

static void erase(const Rule *rule, uint8_t *out, const int64_t *boxes) {
    int64_t width = rule->width, item = rule->item_bytes, channels = rule->channels;
    for (int32_t k = 0; k < rule->boxes; k++, boxes += 4)
        for (int64_t i = boxes[0]; i < boxes[0] + boxes[2]; i++)
            for (int64_t j = boxes[1]; j < boxes[1] + boxes[3]; j++)
                for (int64_t c = 0; c < channels; c++) {
                    int64_t at = rule->out_interleaved ? (i * width + j) * channels + c : (c * rule->height + i) * width + j;
                    memcpy(out + at * item, (const uint8_t *)rule->erased + (k * channels + c) * item, (size_t)item);
                }
}

/* ---- One image ---- */

/* The rows of an image's box in the columns of the result. A planar image has a plane per channel, others have one. */
typedef struct {
    const uint8_t *first; /* the first row */
    int64_t stride, plane_stride;
} Rows;

static void gather_row(uint8_t *to, const uint8_t *from, const int32_t *columns, int64_t count, int64_t channels) {
    if (channels == 1)
        for (int64_t j = 0; j < count; j++) to[j] = from[columns[j] < 0 ? 0 : columns[j]];
    else
        for (int64_t j = 0; j < count; j++)
            memcpy(to + j * channels, from + (columns[j] < 0 ? 0 : columns[j]) * channels, (size_t)channels);
}

static void fill_columns(const Rule *rule, uint8_t *row, const int32_t *columns, int64_t plane, int64_t channels) {
    for (int64_t j = 0; j < rule->width; j++)
        if (columns[j] < 0) memcpy(row + j * channels, rule->fill + plane, (size_t)channels);
}

/* Arrange rows `low` to `high` of a box in the columns of the result, without a copy if possible. */
static int arrange_rows(const Rule *rule, Rows *rows, const int64_t *image, const int32_t *columns, int64_t low,
                        int64_t high, int in_place, Room *rooms) {
    int64_t channels = rule->interleaved ? rule->channels : 1, planes = rule->channels / channels, width = rule->width;
    int is_resized = image[BOX_WIDTH] != image[FULL_WIDTH], filled = 0, shuffled = 0;
    for (int64_t j = 0; j < width; j++) filled |= columns[j] < 0, shuffled |= columns[j] != columns[0] + j;
    int64_t length = image[BOX_WIDTH] * channels, size = width * channels, stride = (size + 2 * LANES - 1) / LANES * LANES;
    if (!is_resized && !shuffled && !filled && in_place) {
        rows->first += columns[0] * channels;
        return 0;
    }
    uint8_t *arranged = take(rooms + ROOM_LINES, (size_t)(planes * (high - low) * stride + stride)), *sideways = NULL;
    Side side = {0};
    if (is_resized) {
        sideways = take(rooms + ROOM_SIDEWAYS, (size_t)((length + size + 3 * LANES) * LANES));
        if (weigh(&side, rooms + ROOM_ACROSS, columns, width, image[BOX_WIDTH], image[FULL_WIDTH], rule->interpolation))
            return -1;
    }
    if (!arranged || (is_resized && !sideways)) return -1;
    for (int64_t plane = 0; plane < planes; plane++)
        for (int64_t row = low; row < high; row += is_resized ? LANES : 1) {
            const uint8_t *from = rows->first + plane * rows->plane_stride + row * rows->stride, *sources[LANES];
            uint8_t *to = arranged + (plane * (high - low) + row - low) * stride, *targets[LANES];
            int64_t last = (high - row < LANES ? high - row : LANES) - 1;
            if (is_resized) {
                for (int64_t i = 0; i < LANES; i++) {
                    sources[i] = from + (i < last ? i : last) * rows->stride;
                    targets[i] = to + (i < last ? i : last) * stride;
                }
                resize_across(targets, sources, length, &side, width, channels, sideways);
            } else if (shuffled || filled) gather_row(to, from, columns, width, channels), last = 0;
            else memcpy(to, from + columns[0] * channels, (size_t)size), last = 0;
            if (filled)
                for (int64_t i = 0; i <= last; i++) fill_columns(rule, to + i * stride, columns, plane, channels);
        }
    *rows = (Rows){arranged - low * stride, stride, (high - low) * stride};
    return 0;
}

static int augment(const Rule *rule, const uint8_t *source, const int64_t *image, uint8_t *out, Room *rooms) {
    int64_t channels = rule->interleaved ? rule->channels : 1, planes = rule->channels / channels;
    int64_t height = rule->height, width = rule->width, size = width * channels, low = INT32_MAX, high = 0;
    int is_resized = image[BOX_HEIGHT] != image[FULL_HEIGHT];
    int32_t *columns = take(rooms + ROOM_COLUMNS, (size_t)width * sizeof *columns), *lines;
    lines = take(rooms + ROOM_ROWS, (size_t)height * sizeof *lines + (size_t)(3 * rule->channels * (width + 2 * LANES)));
    if (!columns || !lines) return -1;
    map_positions(columns, width, image[RIGHT], image[FULL_WIDTH], rule->mode, image[FLIP] != 0);
    map_positions(lines, height, image[DOWN], image[FULL_HEIGHT], rule->mode, 0);
    Side side = {0};
    if (is_resized &&
        weigh(&side, rooms + ROOM_DOWN, lines, height, image[BOX_HEIGHT], image[FULL_HEIGHT], rule->interpolation))
        return -1;
    for (int64_t i = 0; i < height; i++) {
        if (lines[i] < 0) continue;
        int64_t first = is_resized ? side.first[i] : lines[i], last = first + (is_resized ? side.taps[i] : 1);
        low = first < low ? first : low;
        high = last > high ? last : high;
    }
    Rows rows = {source + image[OFFSET] + (image[TOP] * image[WIDTH] + image[LEFT]) * channels,
                 image[WIDTH] * channels, image[HEIGHT] * image[WIDTH]};
    if (low < high && arrange_rows(rule, &rows, image, columns, low, high, !is_resized, rooms)) return -1;
    uint8_t *made = (uint8_t *)(lines + height), *spare = made + rule->channels * (width + 2 * LANES);
    const uint8_t *ready[MOST_CHANNELS];
    for (int64_t i = 0; i < height; i++) {
        for (int64_t plane = 0; plane < planes; plane++) {
            const uint8_t *from = rows.first + plane * rows.plane_stride;
            uint8_t *line = made + plane * (size + 2 * LANES);
            ready[plane] = line;
            if (lines[i] < 0)
                for (int64_t j = 0; j < width; j++) memcpy(line + j * channels, rule->fill + plane, (size_t)channels);
            else if (is_resized)
                resize_down(line, from + side.first[i] * rows.stride, rows.stride, side.weights + i * side.most,
                            side.taps[i], size);
            else ready[plane] = from + lines[i] * rows.stride;
        }
        write_row(rule, out, i, ready, spare);
    }
    erase(rule, out, image + ERASED);
    return 0;
}

static int is_inside(const Rule *rule, const int64_t *image, int64_t num_bytes) {
    int64_t room = image[HEIGHT] * image[WIDTH] * rule->channels;
    return image[HEIGHT] > 0 && image[WIDTH] > 0 && image[OFFSET] >= 0 && image[OFFSET] <= num_bytes - room &&
           image[TOP] >= 0 && image[BOX_HEIGHT] > 0 && image[TOP] + image[BOX_HEIGHT] <= image[HEIGHT] &&
           image[LEFT] >= 0 && image[BOX_WIDTH] > 0 && image[LEFT] + image[BOX_WIDTH] <= image[WIDTH] &&
           image[FULL_HEIGHT] > 0 && image[FULL_WIDTH] > 0;
}

/* Augment `count` images, whose offsets and geometry are the rows of `table`, of `columns` values each. Returns 0; -1
 * if memory is short; -2 if an image is not inside the `num_bytes` of the source. */
EXPORT int h5chunk_augment(const Rule *rule, const uint8_t *source, int64_t num_bytes, const int64_t *table,
                           int64_t columns, int64_t count, uint8_t *out) {
    int64_t result_bytes = (int64_t)rule->channels * rule->height * rule->width * rule->item_bytes;
    Room rooms[NUM_ROOMS] = {{0}};
    int state = rule->channels > MOST_CHANNELS ? -2 : 0;
    for (int64_t i = 0; i < count && !state; i++, table += columns, out += result_bytes)
        state = is_inside(rule, table, num_bytes) ? augment(rule, source, table, out, rooms) : -2;
    for (int i = 0; i < NUM_ROOMS; i++) free(rooms[i].data);
    return state;
}

/* Augment one image as `h5chunk_augment` does, with the caller's buffers. */
int augment_image(const Rule *rule, const uint8_t *source, int64_t num_bytes, const int64_t *image, uint8_t *out,
                  Room *rooms) {
    return is_inside(rule, image, num_bytes) ? augment(rule, source, image, out, rooms) : -2;
}
