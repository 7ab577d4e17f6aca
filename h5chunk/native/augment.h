/* What `jpeg.c` needs of `augment.c`. */
#include <stdint.h>
#include <stdlib.h>

/* columns of a table, of which each row is an image */
enum { OFFSET, HEIGHT, WIDTH, TOP, LEFT, BOX_HEIGHT, BOX_WIDTH, FULL_HEIGHT, FULL_WIDTH, DOWN, RIGHT, FLIP, ERASED };
enum { ROOM_COLUMNS, ROOM_ROWS, ROOM_ACROSS, ROOM_DOWN, ROOM_LINES, ROOM_SIDEWAYS, NUM_ROOMS };

/* What is the same for all images. `values` has 256 results for each channel, `erased` one for each box and channel. */
typedef struct {
    int32_t channels, height, width, interpolation, mode, interleaved, out_interleaved, item_bytes, conversion, boxes;
    const uint8_t *fill;
    const void *values, *erased;
    const float *scale, *shift; /* of a row of results: `width` of each channel, or all channels `width` times */
} Rule;

/* Memory that grows. */
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
