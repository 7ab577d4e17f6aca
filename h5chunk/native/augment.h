/* Declarations of `augment.c` that `jpeg.c` uses. */
#include <stdint.h>
#include <stdlib.h>

/* columns of a table with a row per image */
enum { OFFSET, HEIGHT, WIDTH, TOP, LEFT, BOX_HEIGHT, BOX_WIDTH, FULL_HEIGHT, FULL_WIDTH, DOWN, RIGHT, FLIP, ERASED };
enum { ROOM_COLUMNS, ROOM_ROWS, ROOM_ACROSS, ROOM_DOWN, ROOM_LINES, ROOM_SIDEWAYS, NUM_ROOMS };

/* Parameters for all images. `values` has 256 results for each channel, `erased` has one for each box and channel. */
typedef struct {
    int32_t channels, height, width, interpolation, mode, interleaved, out_interleaved, item_bytes, conversion, boxes;
    const uint8_t *fill;
    const void *values, *erased;
    const float *scale, *shift; /* for one row of results */
} Rule;

/* A buffer that grows. */
typedef struct {
    void *data;
    size_t size;
} Room;

static inline void *take(Room *room, size_t size) {
    if (size <= room->size) return room->data;
    free(room->data);
    room->data = malloc(size);
    room->size = room->data ? size : 0;
    return room->data;
}

int augment_image(const Rule *rule, const uint8_t *source, int64_t num_bytes, const int64_t *image, uint8_t *out,
                  Room *rooms);
