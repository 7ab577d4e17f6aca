/* Bare threads that read shuffled rows of a file into buffers: what a pool of reading threads is compared with. See
 * bench_rows.py, which compiles it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include "../h5chunk/native/maps.c"

enum { PREADV, CACHED, STREAMED };
enum { MOST_VECTORS = 1024 };

/* `count` windows of `rows` rows each: chunk after chunk, to shuffled rows of one buffer after another. */
typedef struct {
    int64_t kind, descriptor, row_bytes, chunk_rows, window_rows, num_windows, num_buffers;
    const uint8_t *map;
    const int64_t *offsets, *places; /* of each chunk of each window; of each row of a window */
    uint8_t *const *buffers;
    int64_t num_taken, has_failed;
} Loop;

static int copy_chunk(const Loop *loop, int64_t offset, const int64_t *places, uint8_t *out) {
    struct iovec vectors[MOST_VECTORS];
    int64_t count = loop->chunk_rows, size = loop->row_bytes;
    for (int64_t i = 0; i < count; i++) {
        uint8_t *to = out + places[i] * size;
        if (loop->kind == PREADV) vectors[i] = (struct iovec){to, (size_t)size};
        else if (loop->kind == CACHED) memcpy(to, loop->map + offset + i * size, (size_t)size);
        else h5chunk_stream(to, loop->map + offset + i * size, size);
    }
    return loop->kind == PREADV && preadv((int)loop->descriptor, vectors, (int)count, offset) != count * size;
}

static void *read_windows(void *argument) {
    Loop *loop = argument;
    int64_t chunks = loop->window_rows / loop->chunk_rows;
    for (int64_t i; (i = __atomic_fetch_add(&loop->num_taken, 1, __ATOMIC_RELAXED)) < loop->num_windows * chunks;) {
        const int64_t *places = loop->places + i % chunks * loop->chunk_rows;
        if (copy_chunk(loop, loop->offsets[i], places, loop->buffers[i / chunks % loop->num_buffers])) loop->has_failed = 1;
    }
    return NULL;
}

EXPORT int64_t run_loop(Loop *loop, int64_t num_threads) {
    pthread_t threads[64];
    loop->num_taken = loop->has_failed = 0;
    for (int64_t i = 0; i < num_threads; i++) pthread_create(threads + i, NULL, read_windows, loop);
    for (int64_t i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    return loop->has_failed;
}
