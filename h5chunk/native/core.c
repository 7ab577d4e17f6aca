/* A pool of threads that read rows, byte ranges and coded blocks of files into scattered memory, and gather rows of memory.
 *
 * It does not depend on HDF5, orders or Python: the caller submits tables of jobs and waits for tickets. The tables, and
 * all memory that they refer to, belong to the caller and must stay valid until the ticket is done.
 *
 * Every function may be called by any thread, but not in a fork of the process that opened the pool.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "filters.h"
#include "maps.h"

#define EXPORT __attribute__((visibility("default")))
#define VERSION 20

enum { READ = 0, VERIFY = 1, GATHER = 2, ROWS = 3, BLOCKS = 4 }; /* kinds of jobs */
/* statuses of tickets */
enum { DONE = 0, SYSTEM = 1, CUT_SHORT = 2, CHECKSUM = 3, CANCELLED = 4, CHANGED = 5, NOT_SENT = 6, DAMAGED = 7 };
enum { EMPTY = 0, FILLING = 1, FULL = 2 }; /* states of memory that several jobs share */

enum { MAX_VECTORS = 1024 };        /* IOV_MAX of Linux and macOS */
enum { PIECE_BYTES = 128 << 10 };   /* bytes that are read and then checksummed while they are in the cache */
enum { LOOKED_AT = 4 };             /* rows of a job that are looked at to see whether they are in memory */
enum { PREFETCHED_ROWS = 2, PREFETCHED_BYTES = 2048 };
enum { RUN_BYTES = 2 << 20 };       /* approximate bytes per system call that reads rows */
enum { ASKED_BYTES = 16 << 20 };    /* bytes that are prefetched from disk before a thread reads them */
enum { ASKED_TICKETS = 4 };
enum { POLL_NS = 20000 };           /* time between two questions whether a buffer is free, or a block is decoded */

/* A job; the meaning of its fields depends on its kind.
 *
 * READ    `count` vectors (struct iovec) at `source` are filled from `offset` of `descriptor`: `num_bytes` in all.
 *         With `is_checked`, the CRC-32 of these bytes must be `expected`.
 * VERIFY  the CRC-32 of `num_bytes` from `offset` of `descriptor` must be `expected`.
 * GATHER  row i of `destination` becomes row `indices[i]` of `source`, `count` rows of `num_bytes / count` bytes.
 * ROWS    `count` entries of the `Rows` at `source` are read, from entry `offset` on: about `num_bytes`. `map` is NULL, or
 *         has the first `mapped_bytes` of the file.
 * BLOCKS  `count` blocks of the `Blocks` at `source` are read, decoded and copied, from block `offset` on. */
typedef struct {
    int32_t kind, descriptor;
    int64_t offset, count, num_bytes;
    const void *source;
    const int64_t *indices;
    void *destination;
    uint32_t expected, is_checked;
    const uint8_t *map;
    int64_t mapped_bytes;
} Job;

/* Rows of a file, `block_rows` at each offset of `blocks`, and their destinations in memory. Entry i is row `rows[i]`,
 * or the `counts[i]` rows that start there; they are read to row `destinations[i]` of `out`. */
typedef struct {
    const int64_t *blocks;
    int64_t block_rows, row_bytes;
    const int64_t *rows, *counts, *destinations;
    uint8_t *out;
} Rows;

/* A stored block of an array. It is decoded to `target`; or, if that is NULL, to memory of the thread. If `state` is not
 * NULL, other jobs may need the target as well, and the first one fills it. Parts `first` to `end` are then copied. */
typedef struct {
    int64_t offset, stored_bytes, num_bytes, mask, pipeline, first, end; /* bit i of the mask: filter i was skipped */
    const int64_t *shape;                                                /* in items */
    uint8_t *target;
    int32_t *state;
} Block;

/* Blocks, and the parts of them that are copied to elements of `out`, as `h5chunk_copy_boxes` describes. */
typedef struct {
    const Block *blocks;
    const Pipeline *pipelines;
    const int64_t *parts;
    int64_t axes, item_bytes;
    uint8_t *out;
    const int64_t *out_shape;
} Blocks;

/* The memory of a thread: `PIECE_BYTES`, and what it needs to decode blocks. */
typedef struct {
    uint8_t *piece;
    Coder coder;
    int is_cached; /* as in `Pool` */
} Scratch;

void h5chunk_copy_boxes(const uint8_t *from, const int64_t *from_shape, int64_t axes, int64_t item_bytes,
                        const int64_t *boxes, int64_t count, uint8_t *to, const int64_t *to_shape);

/* Work of the thread that ends the last job of a ticket, if no job has failed. If `path` is not NULL, the thread checks
 * that this file is unchanged. Then, if `send` is not NULL, it calls `send`, which returns 0 or an error. */
typedef struct {
    int (*send)(const void *);
    const void *argument;
    const char *path;
    int64_t device, inode, size, modified_ns;
} Ending;

/* Memory that several tickets fill one after another, in the order in which they were submitted. A ticket begins once the
 * previous one has ended and `is_free`, called with the argument of that ticket's ending, returns a value other than 0. */
typedef struct {
    int (*is_free)(const void *);
    const void *last; /* NULL if no ticket has used the buffer */
    int64_t is_taken; /* by a ticket that has begun and not ended; only the pool uses this field */
} Buffer;

typedef struct {
    uint64_t ticket;
    int32_t status, error; /* `error`: errno for SYSTEM, the checksum for CHECKSUM, the error of `send` for NOT_SENT */
    int64_t job;    /* index of the job that failed first */
    int64_t offset; /* offset in the file at which the job failed */
} Result;

typedef struct Ticket {
    struct Ticket *next;
    const Job *jobs;
    const Ending *ending;
    Buffer *buffer;
    int is_beginning, has_begun; /* whether a thread waits for the buffer; whether this ticket has taken it */
    int64_t num_jobs, num_taken, num_left;
    int64_t num_asked, bytes_ahead; /* jobs whose data is prefetched, and the bytes of those that no thread has taken */
    Result result;
} Ticket;

typedef struct {
    Ticket *first, *last;
} Queue;

typedef struct Pool {
    pthread_mutex_t lock;
    pthread_cond_t work, done, ended;
    Queue waiting;   /* tickets with jobs that no thread has taken */
    Queue finished;  /* tickets that `wait` has not yet returned */
    int64_t part_bytes, progress, decoding; /* `progress` and `decoding` are nanoseconds of all threads */
    int64_t num_open; /* tickets that were submitted and not returned */
    int num_threads, is_closing, is_left;
    int is_cached; /* rows of maps are copied through the caches, because a copy to a device follows at once */
} Pool;

/* ---- CRC-32, as zlib computes it ---- */

static uint32_t tables[8][256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void make_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) value = (value >> 1) ^ (0xEDB88320u & -(value & 1));
        tables[0][i] = value;
    }
    for (int table = 1; table < 8; table++)
        for (int i = 0; i < 256; i++)
            tables[table][i] = (tables[table - 1][i] >> 8) ^ tables[0][tables[table - 1][i] & 0xFF];
}

/* Compute the CRC-32 with tables, eight bytes at a time; `crc` and the result are inverted. */
static uint32_t crc_by_tables(uint32_t crc, const uint8_t *data, size_t length) {
    pthread_once(&tables_once, make_tables);
    for (; length >= 8; data += 8, length -= 8) {
        uint32_t low, high;
        memcpy(&low, data, 4);
        memcpy(&high, data + 4, 4);
        low ^= crc;
        crc = tables[7][low & 0xFF] ^ tables[6][low >> 8 & 0xFF] ^ tables[5][low >> 16 & 0xFF] ^ tables[4][low >> 24] ^
              tables[3][high & 0xFF] ^ tables[2][high >> 8 & 0xFF] ^ tables[1][high >> 16 & 0xFF] ^ tables[0][high >> 24];
    }
    while (length--) crc = (crc >> 8) ^ tables[0][(crc ^ *data++) & 0xFF];
    return crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Compute the CRC-32 by carry-less multiplication, 64 bytes at a time. Source: Gopal et al., "Fast CRC Computation for
 * Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009. The constants are powers of x modulo the reflected
 * polynomial. */
__attribute__((target("pclmul,sse4.1"))) static __m128i fold(__m128i state, __m128i next, __m128i powers) {
    __m128i low = _mm_clmulepi64_si128(state, powers, 0x00);
    __m128i high = _mm_clmulepi64_si128(state, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_folding(uint32_t crc, const uint8_t *data, size_t length) {
    const __m128i by_four = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    __m128i state[4];
    for (int i = 0; i < 4; i++) state[i] = _mm_loadu_si128((const __m128i *)data + i);
    state[0] = _mm_xor_si128(state[0], _mm_cvtsi32_si128((int)crc));
    for (data += 64, length -= 64; length >= 64; data += 64, length -= 64)
        for (int i = 0; i < 4; i++)
            state[i] = fold(state[i], _mm_loadu_si128((const __m128i *)data + i), by_four);
    for (int i = 1; i < 4; i++) state[0] = fold(state[0], state[i], by_one);
    /* The remaining 16 bytes have the same checksum as all bytes before, and the tables compute it. */
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, state[0]);
    return crc_by_tables(crc_by_tables(0, rest, sizeof rest), data, length);
}

#define WIDE __attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq")))

/* Like `crc_by_folding`, but 256 bytes at a time. */
WIDE static uint32_t crc_by_wide_folding(uint32_t crc, const uint8_t *data, size_t length) {
    const __m512i by_four = _mm512_set4_epi64(0x01322d1430, 0x011542778a, 0x01322d1430, 0x011542778a);
    __m512i state[4];
    for (int i = 0; i < 4; i++) state[i] = _mm512_loadu_si512(data + 64 * i);
    state[0] = _mm512_xor_si512(state[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (data += 256, length -= 256; length >= 256; data += 256, length -= 256)
        for (int i = 0; i < 4; i++) {
            __m512i low = _mm512_clmulepi64_epi128(state[i], by_four, 0x00);
            __m512i high = _mm512_clmulepi64_epi128(state[i], by_four, 0x11);
            state[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(data + 64 * i), 0x96);
        }
    uint8_t rest[256]; /* has the same checksum as all bytes before */
    for (int i = 0; i < 4; i++) _mm512_storeu_si512(rest + 64 * i, state[i]);
    crc = crc_by_folding(0, rest, sizeof rest);
    return length >= 64 ? crc_by_folding(crc, data, length) : crc_by_tables(crc, data, length);
}
#endif

EXPORT uint32_t h5chunk_crc32(const uint8_t *data, int64_t length, uint32_t start) {
#if defined(__x86_64__)
    if (length >= 512 && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f"))
        return ~crc_by_wide_folding(~start, data, (size_t)length);
    if (length >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
        return ~crc_by_folding(~start, data, (size_t)length);
#endif
    return ~crc_by_tables(~start, data, (size_t)length);
}

/* ---- Running jobs ---- */

static int64_t nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Fill memory from a file. Returns 0, or -1 with the error in `result`. */
static int read_rest(int descriptor, uint8_t *out, int64_t num_bytes, int64_t offset, Result *result) {
    while (num_bytes > 0) {
        ssize_t got = pread(descriptor, out, (size_t)num_bytes, offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            result->status = got < 0 ? SYSTEM : CUT_SHORT;
            result->error = got < 0 ? errno : 0;
            result->offset = offset;
            return -1;
        }
        out += got;
        num_bytes -= got;
        offset += got;
    }
    return 0;
}

/* Fill vectors of `num_bytes` in total. Usually one call suffices, but a call may read less than requested. */
static int read_vectors(int descriptor, const struct iovec *vectors, int count, int64_t num_bytes, int64_t offset,
                        Result *result) {
    int64_t got = preadv(descriptor, vectors, count, offset);
    if (got == num_bytes) return 0;
    for (got = got < 0 ? 0 : got; count--; vectors++) {
        int64_t length = (int64_t)vectors->iov_len;
        if (got < length && read_rest(descriptor, (uint8_t *)vectors->iov_base + got, length - got, offset + got, result))
            return -1;
        offset += length;
        got = got > length ? got - length : 0;
    }
    return 0;
}

static int check(uint32_t crc, const Job *job, Result *result) {
    if (crc == job->expected) return 0;
    result->status = CHECKSUM;
    result->error = (int32_t)crc;
    result->offset = job->offset;
    return -1;
}

static int do_read(const Job *job, Result *result) {
    const struct iovec *vectors = job->source;
    int64_t offset = job->offset, most_bytes = job->is_checked ? PIECE_BYTES : INT64_MAX;
    uint32_t crc = 0;
    for (int64_t first = 0; first < job->count;) {
        int64_t num_bytes = 0;
        int count = 0;
        while (first + count < job->count && count < MAX_VECTORS && (!count || num_bytes < most_bytes))
            num_bytes += (int64_t)vectors[first + count++].iov_len;
        if (read_vectors(job->descriptor, vectors + first, count, num_bytes, offset, result)) return -1;
        if (job->is_checked)
            for (int i = 0; i < count; i++)
                crc = h5chunk_crc32(vectors[first + i].iov_base, (int64_t)vectors[first + i].iov_len, crc);
        offset += num_bytes;
        first += count;
    }
    return job->is_checked ? check(crc, job, result) : 0;
}

#if defined(RWF_NOWAIT)
/* Return whether a byte of a file must be read from disk. */
static int is_on_disk(int descriptor, int64_t offset) {
    char byte;
    struct iovec vector = {.iov_base = &byte, .iov_len = 1};
    return preadv2(descriptor, &vector, 1, offset, RWF_NOWAIT) < 0 && errno == EAGAIN;
}

/* Prefetch bytes from disk, without waiting for them. */
static void ask(int descriptor, int64_t offset, int64_t num_bytes) {
    if (num_bytes > 0) posix_fadvise(descriptor, offset, num_bytes, POSIX_FADV_WILLNEED); /* 0 would mean all bytes up to the end */
}
#else
static int is_on_disk(int descriptor, int64_t offset) { return (void)descriptor, (void)offset, 0; }
static void ask(int descriptor, int64_t offset, int64_t num_bytes) { (void)descriptor, (void)offset, (void)num_bytes; }
#endif

/* Return where entry i of a job begins in the file, and its size. */
static int64_t place_of(const Job *job, int64_t i, int64_t *size) {
    if (job->kind == BLOCKS) {
        const Block *block = ((const Blocks *)job->source)->blocks + i;
        *size = block->stored_bytes;
        return block->offset;
    }
    const Rows *table = job->source;
    int64_t row = table->rows[i];
    *size = (table->counts ? table->counts[i] : 1) * table->row_bytes;
    return table->blocks[row / table->block_rows] + row % table->block_rows * table->row_bytes;
}

/* Prefetch the data of a job from disk, unless its beginning is in the page cache. */
static void ask_for(const Job *job) {
    if (job->kind != ROWS && job->kind != BLOCKS) {
        if (is_on_disk(job->descriptor, job->offset)) ask(job->descriptor, job->offset, job->num_bytes);
        return;
    }
    int64_t start = 0, end = 0;
    for (int64_t i = job->offset; i < job->offset + job->count; i++) {
        int64_t size, offset = place_of(job, i, &size);
        if (i == job->offset && !is_on_disk(job->descriptor, offset)) return;
        if (offset != end) {
            ask(job->descriptor, start, end - start);
            start = offset;
        }
        end = offset + size;
    }
    ask(job->descriptor, start, end - start);
}

/* Fill vectors from the file or, if it is mapped, from memory, unless the map ends before. */
static int fill_vectors(const Job *job, const struct iovec *vectors, int count, int64_t num_bytes, int64_t offset,
                        int is_cached, Result *result) {
    if (!job->map) return read_vectors(job->descriptor, vectors, count, num_bytes, offset, result);
    for (; count--; vectors++) {
        int64_t length = (int64_t)vectors->iov_len;
        if (offset < 0 || length < 0 || length > job->mapped_bytes - offset) return -1;
        if (is_cached) memcpy(vectors->iov_base, job->map + offset, (size_t)length);
        else h5chunk_stream(vectors->iov_base, job->map + offset, length);
        offset += length;
    }
    return 0;
}

/* Read rows. Rows that are adjacent in the file share a system call, and adjacent destinations share a vector. */
static int read_rows(const Job *job, const Scratch *scratch, Result *result) {
    struct iovec *vectors = (struct iovec *)scratch->piece;
    const Rows *table = job->source;
    int64_t block_rows = table->block_rows, first_row = 0, start = 0, end = 0, base = 0;
    uint8_t *to_end = NULL;
    int count = 0;
    for (int64_t i = job->offset; i < job->offset + job->count; i++) {
        int64_t row = table->rows[i], size = (table->counts ? table->counts[i] : 1) * table->row_bytes;
        uint8_t *to = table->out + table->destinations[i] * table->row_bytes;
        if (i == job->offset || row < first_row || row >= first_row + block_rows) {
            base = table->blocks[row / block_rows];
            first_row = row / block_rows * block_rows;
        }
        int64_t offset = base + (row - first_row) * table->row_bytes;
        if (count && (offset != end || count == MAX_VECTORS || end - start >= RUN_BYTES)) {
            if (fill_vectors(job, vectors, count, end - start, start, scratch->is_cached, result)) return -1;
            count = 0;
        }
        if (!count) start = offset;
        if (!count || to != to_end) vectors[count++] = (struct iovec){.iov_base = to, .iov_len = 0};
        vectors[count - 1].iov_len += (size_t)size;
        end = offset + size;
        to_end = to + size;
    }
    return count ? fill_vectors(job, vectors, count, end - start, start, scratch->is_cached, result) : 0;
}

typedef struct {
    const Job *job;
    const Scratch *scratch;
} RowCopy;

/* Return whether some of a job's rows must be read from disk, as far as a few of them tell. */
static int are_on_disk(const Job *job) {
    for (int64_t i = 0; i < LOOKED_AT; i++) {
        int64_t size, offset = place_of(job, job->offset + (job->count - 1) * i / (LOOKED_AT - 1), &size);
        if (is_on_disk(job->descriptor, i ? offset + size - 1 : offset)) return 1;
    }
    return 0;
}

/* Copy rows from the map, unless they are not in memory, where the kernel reads ahead better. Returns -1 if the file has
 * become shorter: the rest of its last page is zeros then. */
static int copy_rows(void *argument) {
    const RowCopy *copy = argument;
    Result unused;
    struct stat found;
    if (are_on_disk(copy->job) || read_rows(copy->job, copy->scratch, &unused)) return -1;
    return fstat(copy->job->descriptor, &found) || found.st_size < copy->job->mapped_bytes ? -1 : 0;
}

static int do_rows(const Job *job, const Scratch *scratch, Result *result) {
    RowCopy copy = {job, scratch};
    if (job->map && job->count && !h5chunk_guarded(copy_rows, &copy)) return 0;
    Job read = *job;
    read.map = NULL;
    return read_rows(&read, scratch, result);
}

/* Read and decode a block to `out`. A block without filters may be shorter than the memory for it. */
static int fill_block(const Blocks *table, const Block *block, int descriptor, uint8_t *out, Coder *coder, Result *result) {
    const Pipeline *pipeline = table->pipelines + block->pipeline;
    uint8_t *stored = pipeline->count ? h5chunk_stored(coder, block->stored_bytes) : out;
    int is_damaged = !stored || (!pipeline->count && block->stored_bytes > block->num_bytes);
    if (!is_damaged && read_rest(descriptor, stored, block->stored_bytes, block->offset, result)) return -1;
    if (!is_damaged && pipeline->count) {
        int64_t started = nanoseconds();
        is_damaged = h5chunk_decode_block(coder, pipeline, block->mask, stored, block->stored_bytes, out, block->num_bytes);
        coder->worked += nanoseconds() - started;
    }
    if (!is_damaged) return 0;
    result->status = DAMAGED;
    result->offset = block->offset;
    return -1;
}

/* Fill memory that other threads may need as well, unless one of them has done so. */
static int fill_shared(const Blocks *table, const Block *block, int descriptor, Coder *coder, Result *result) {
    for (;;) {
        int32_t state = __atomic_load_n(block->state, __ATOMIC_ACQUIRE), empty = EMPTY;
        if (state == FULL) return 0;
        if (state == EMPTY &&
            __atomic_compare_exchange_n(block->state, &empty, FILLING, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            int failed = fill_block(table, block, descriptor, block->target, coder, result);
            __atomic_store_n(block->state, failed ? EMPTY : FULL, __ATOMIC_RELEASE);
            return failed;
        }
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
}

static int do_blocks(const Job *job, Coder *coder, Result *result) {
    const Blocks *table = job->source;
    const int64_t columns = 1 + 3 * table->axes;
    for (const Block *block = table->blocks + job->offset, *end = block + job->count; block < end; block++) {
        uint8_t *values = block->target ? block->target : h5chunk_decoded(coder, block->num_bytes);
        int failed = !values || (block->state ? fill_shared(table, block, job->descriptor, coder, result)
                                              : fill_block(table, block, job->descriptor, values, coder, result));
        if (!values) *result = (Result){.status = DAMAGED, .offset = block->offset};
        if (failed) return -1;
        h5chunk_copy_boxes(values, block->shape, table->axes, table->item_bytes, table->parts + block->first * columns,
                           block->end - block->first, table->out, table->out_shape);
    }
    return 0;
}

static int do_verify(const Job *job, uint8_t *scratch, Result *result) {
    uint32_t crc = 0;
    for (int64_t done = 0; done < job->num_bytes; done += PIECE_BYTES) {
        int64_t left = job->num_bytes - done, size = left < PIECE_BYTES ? left : PIECE_BYTES;
        if (read_rest(job->descriptor, scratch, size, job->offset + done, result)) return -1;
        crc = h5chunk_crc32(scratch, size, crc);
    }
    return check(crc, job, result);
}

#define GATHER_NUMBERS(type)                                                                       \
    do {                                                                                           \
        const type *from = source;                                                                 \
        type *to = destination;                                                                    \
        for (int64_t i = 0; i < count; i++) to[i] = from[indices[i]];                              \
    } while (0)

/* Prefetch the beginning of a row into the second-level cache; the processor itself prefetches the rest. */
static void prefetch_beginning(const uint8_t *row, int64_t row_bytes) {
    for (int64_t i = 0; i < row_bytes && i < PREFETCHED_BYTES; i += 64) __builtin_prefetch(row + i, 0, 2);
}

static void gather(const void *source, int64_t row_bytes, const int64_t *indices, int64_t count, void *destination) {
    if (row_bytes == 1) GATHER_NUMBERS(uint8_t);
    else if (row_bytes == 8 && !(((uintptr_t)source | (uintptr_t)destination) & 7)) GATHER_NUMBERS(uint64_t);
    else
        for (int64_t i = 0; i < count; i++) {
            if (i + PREFETCHED_ROWS < count)
                prefetch_beginning((const uint8_t *)source + indices[i + PREFETCHED_ROWS] * row_bytes, row_bytes);
            memcpy((uint8_t *)destination + i * row_bytes, (const uint8_t *)source + indices[i] * row_bytes,
                   (size_t)row_bytes);
        }
}

static int do_job(const Job *job, Scratch *scratch, Result *result) {
    if (job->kind == READ) return do_read(job, result);
    if (job->kind == VERIFY) return do_verify(job, scratch->piece, result);
    if (job->kind == ROWS) return do_rows(job, scratch, result);
    if (job->kind == BLOCKS) return do_blocks(job, &scratch->coder, result);
    gather(job->source, job->num_bytes / job->count, job->indices, job->count, job->destination);
    return 0;
}

/* Run jobs in the calling thread. The result describes the first failed job, and is all zeros if none failed. */
EXPORT void h5chunk_run(const Job *jobs, int64_t num_jobs, Result *result) {
    Scratch scratch = {.piece = malloc(PIECE_BYTES)};
    *result = (Result){.status = scratch.piece ? DONE : SYSTEM, .error = scratch.piece ? 0 : ENOMEM};
    for (int64_t i = 0; scratch.piece && i < num_jobs && !result->status; i++)
        if (do_job(jobs + i, &scratch, result)) result->job = i;
    free(scratch.piece);
    h5chunk_free_coder(&scratch.coder);
}

/* ---- The pool ---- */

static void push(Queue *queue, Ticket *ticket) {
    ticket->next = NULL;
    if (queue->last) queue->last->next = ticket;
    else queue->first = ticket;
    queue->last = ticket;
}

static Ticket *pop(Queue *queue) {
    Ticket *ticket = queue->first;
    if (ticket && !(queue->first = ticket->next)) queue->last = NULL;
    return ticket;
}

/* Count jobs of a ticket as done. The caller holds the lock. */
static void finish(Pool *pool, Ticket *ticket, int64_t num_jobs) {
    pool->progress++;
    ticket->num_left -= num_jobs;
    if (ticket->num_left) return;
    if (ticket->has_begun) {
        ticket->buffer->is_taken = 0;
        ticket->buffer->last = ticket->ending->argument;
        pthread_cond_signal(&pool->work);
    }
    push(&pool->finished, ticket);
    pthread_cond_signal(&pool->done);
}

static int is_unchanged(const Ending *ending) {
    struct stat found;
    if (stat(ending->path, &found)) return 0;
#if defined(__APPLE__)
    struct timespec modified = found.st_mtimespec;
#else
    struct timespec modified = found.st_mtim;
#endif
    return (int64_t)found.st_dev == ending->device && (int64_t)found.st_ino == ending->inode &&
           (int64_t)found.st_size == ending->size &&
           (int64_t)modified.tv_sec * 1000000000 + modified.tv_nsec == ending->modified_ns;
}

static void end(const Ending *ending, Result *result) {
    if (ending->path && !is_unchanged(ending)) result->status = CHANGED;
    else if (ending->send && (result->error = ending->send(ending->argument))) result->status = NOT_SENT;
}

/* Cancel those jobs of the first waiting ticket that no thread has taken. The caller holds the lock. */
static void skip_first(Pool *pool, int status) {
    Ticket *ticket = pop(&pool->waiting);
    int64_t num_left = ticket->num_jobs - ticket->num_taken;
    if (ticket->result.status == DONE) ticket->result.status = status;
    ticket->num_taken = ticket->num_jobs;
    finish(pool, ticket, num_left);
}

/* Take jobs of about `part_bytes` from the first waiting ticket. The caller holds the lock. */
static int64_t take(Pool *pool, Ticket *ticket) {
    int64_t first = ticket->num_taken, num_bytes = 0;
    while (ticket->num_taken < ticket->num_jobs && num_bytes < pool->part_bytes)
        num_bytes += ticket->jobs[ticket->num_taken++].num_bytes;
    if (ticket->num_asked < ticket->num_taken) ticket->num_asked = ticket->num_taken;
    ticket->bytes_ahead = ticket->bytes_ahead > num_bytes ? ticket->bytes_ahead - num_bytes : 0;
    if (ticket->num_taken == ticket->num_jobs) pop(&pool->waiting);
    return ticket->num_taken - first;
}

static void free_pool(Pool *pool) {
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->ended);
    for (Ticket *ticket; (ticket = pop(&pool->finished));) free(ticket);
    free(pool);
}

/* Count jobs of a ticket as done, or as prefetched, by this thread; the last thread also runs the ending. The caller
 * holds the lock. */
static void leave(Pool *pool, Ticket *ticket, int64_t num_jobs) {
    if (ticket->num_left == num_jobs && ticket->result.status == DONE && ticket->ending) {
        pthread_mutex_unlock(&pool->lock); /* the ticket is in no queue, and no other thread has its jobs */
        end(ticket->ending, &ticket->result);
        pthread_mutex_lock(&pool->lock);
    }
    finish(pool, ticket, num_jobs);
}

/* Return the first waiting ticket with a job whose data should be prefetched now. The caller holds the lock. */
static Ticket *next_to_ask(const Pool *pool) {
    int64_t num_bytes = 0;
    Ticket *ticket = pool->waiting.first;
    for (int i = 0; ticket && i < ASKED_TICKETS; i++, ticket = ticket->next) {
        num_bytes += ticket->bytes_ahead;
        if (num_bytes >= ASKED_BYTES) return NULL;
        while (ticket->num_asked < ticket->num_jobs && ticket->jobs[ticket->num_asked].kind == GATHER)
            ticket->num_asked++;
        if (ticket->num_asked < ticket->num_jobs && ticket->result.status == DONE) return ticket;
    }
    return NULL;
}

/* Prefetch data that will be read soon, so that few threads keep the disk busy. The caller holds the lock. */
static void ask_ahead(Pool *pool) {
    for (Ticket *ticket; (ticket = next_to_ask(pool));) {
        const Job *job = ticket->jobs + ticket->num_asked++;
        ticket->bytes_ahead += job->num_bytes;
        ticket->num_left++; /* keeps the ticket and its jobs alive */
        pthread_mutex_unlock(&pool->lock);
        ask_for(job);
        pthread_mutex_lock(&pool->lock);
        leave(pool, ticket, 1);
    }
}

/* Run a part of the first waiting ticket. The caller holds the lock. */
static void run_part(Pool *pool, Scratch *scratch) {
    Ticket *ticket = pool->waiting.first;
    if (ticket->result.status != DONE) {
        skip_first(pool, CANCELLED);
        return;
    }
    const Job *job = ticket->jobs + ticket->num_taken;
    int64_t count = take(pool, ticket);
    if (pool->waiting.first) pthread_cond_signal(&pool->work); /* each thread wakes the next one */
    pthread_mutex_unlock(&pool->lock);
    Result result = {0};
    int64_t started = nanoseconds();
    for (int64_t i = 0; i < count && !result.status; i++)
        if (do_job(job + i, scratch, &result)) result.job = job + i - ticket->jobs;
    int64_t worked = nanoseconds() - started;
    pthread_mutex_lock(&pool->lock);
    pool->progress += worked;
    pool->decoding += scratch->coder.worked;
    scratch->coder.worked = 0;
    if (result.status && ticket->result.status == DONE) {
        result.ticket = ticket->result.ticket;
        ticket->result = result;
    }
    leave(pool, ticket, count);
}

static int needs_buffer(const Ticket *ticket) {
    return ticket->buffer && !ticket->has_begun && ticket->result.status == DONE;
}

/* Wait until the buffer of the first waiting ticket is free, and take it. The caller holds the lock. */
static void begin(Pool *pool, Ticket *ticket) {
    Buffer *buffer = ticket->buffer;
    int is_free = !buffer->last;
    ticket->is_beginning = 1;
    ticket->num_left++; /* keeps the ticket alive */
    while (!is_free && ticket->result.status == DONE) {
        pthread_mutex_unlock(&pool->lock);
        is_free = buffer->is_free(buffer->last);
        if (!is_free) nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
        pthread_mutex_lock(&pool->lock);
        pool->progress++; /* waiting for a device is not a read that hangs */
    }
    ticket->is_beginning = 0;
    if (ticket->result.status == DONE) ticket->has_begun = buffer->is_taken = 1;
    leave(pool, ticket, 1);
}

static void *run(void *argument) {
    Pool *pool = argument;
    Scratch scratch = {.piece = malloc(PIECE_BYTES), .is_cached = pool->is_cached};
    pthread_mutex_lock(&pool->lock);
    while (scratch.piece && (pool->waiting.first || !pool->is_closing)) {
        ask_ahead(pool);
        Ticket *ticket = pool->waiting.first;
        int needs = ticket && needs_buffer(ticket), must_wait = needs && (ticket->is_beginning || ticket->buffer->is_taken);
        if (needs && !must_wait) begin(pool, ticket);
        else if (ticket && !must_wait) run_part(pool, &scratch);
        else if (!pool->is_closing) pthread_cond_wait(&pool->work, &pool->lock);
    }
    free(scratch.piece);
    h5chunk_free_coder(&scratch.coder);
    pool->num_threads--;
    pthread_cond_broadcast(&pool->ended);
    if (pool->is_left && !pool->num_threads) free_pool(pool);
    else pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void make_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

static struct timespec after(double seconds) {
    struct timespec time;
#if defined(__APPLE__)
    clock_gettime(CLOCK_REALTIME, &time);
#else
    clock_gettime(CLOCK_MONOTONIC, &time);
#endif
    int64_t nanoseconds = time.tv_nsec + (int64_t)((seconds - (int64_t)seconds) * 1e9);
    time.tv_sec += (time_t)((int64_t)seconds + nanoseconds / 1000000000);
    time.tv_nsec = (long)(nanoseconds % 1000000000);
    return time;
}

EXPORT int h5chunk_version(void) { return VERSION; }

/* Create a pool. Returns NULL if memory is short, or if no thread could be started. */
EXPORT Pool *h5chunk_open(int num_threads, int64_t part_bytes, int is_cached) {
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->part_bytes = part_bytes;
    pool->is_cached = is_cached;
    pthread_mutex_init(&pool->lock, NULL);
    make_condition(&pool->work);
    make_condition(&pool->done);
    make_condition(&pool->ended);
    pthread_mutex_lock(&pool->lock);
    for (pthread_t thread; pool->num_threads < num_threads; pool->num_threads++) {
        if (pthread_create(&thread, NULL, run, pool)) break;
        pthread_detach(thread);
    }
    if (!pool->num_threads) {
        free_pool(pool);
        return NULL;
    }
    pthread_mutex_unlock(&pool->lock);
    return pool;
}

/* Queue jobs. Returns 0, or -1 if memory is short or the pool is closing. `ending` may be NULL, and must be NULL if there
 * are no jobs. `buffer` may be NULL; otherwise there must be an ending. */
EXPORT int h5chunk_submit(Pool *pool, uint64_t number, const Job *jobs, int64_t num_jobs, const Ending *ending, Buffer *buffer) {
    Ticket *ticket = calloc(1, sizeof *ticket);
    if (!ticket) return -1;
    ticket->jobs = jobs;
    ticket->ending = ending;
    ticket->buffer = buffer;
    ticket->num_jobs = ticket->num_left = num_jobs;
    ticket->result.ticket = number;
    pthread_mutex_lock(&pool->lock);
    int is_closing = pool->is_closing;
    pool->num_open += !is_closing;
    if (is_closing) free(ticket);
    else if (num_jobs) push(&pool->waiting, ticket);
    else finish(pool, ticket, 0);
    pthread_cond_signal(&pool->work); /* waking all threads would take the caller longer than all other work here */
    pthread_mutex_unlock(&pool->lock);
    return is_closing ? -1 : 0;
}

/* Wait for the next ticket that is done. Returns 1 and its result; 0 after `timeout_s`; -1 if the pool is closing and all
 * tickets were returned. */
EXPORT int h5chunk_wait(Pool *pool, double timeout_s, Result *result) {
    struct timespec end = after(timeout_s);
    pthread_mutex_lock(&pool->lock);
    int error = 0;
    while (!pool->finished.first && !(pool->is_closing && !pool->num_open) && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&pool->done, &pool->lock, &end);
    Ticket *ticket = pop(&pool->finished);
    pool->num_open -= !!ticket;
    int found = ticket ? 1 : pool->is_closing && !pool->num_open ? -1 : 0;
    pthread_mutex_unlock(&pool->lock);
    if (ticket) *result = ticket->result;
    free(ticket);
    return found;
}

/* Return the number of running threads, which is less than requested if the system refused more; the number of tickets
 * that were submitted and not returned; or the nanoseconds for which threads have run jobs, and of these have decoded blocks,
 * which increase whenever a part of a job ends. */
#define COUNT(type, name)                    \
    EXPORT type h5chunk_##name(Pool *pool) { \
        pthread_mutex_lock(&pool->lock);     \
        type name = pool->name;              \
        pthread_mutex_unlock(&pool->lock);   \
        return name;                         \
    }

COUNT(int, num_threads)
COUNT(int64_t, num_open)
COUNT(int64_t, progress)
COUNT(int64_t, decoding)

/* Drop jobs that no thread has taken. Their tickets end once the jobs that threads have taken are done. */
EXPORT void h5chunk_cancel(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    while (pool->waiting.first) skip_first(pool, CANCELLED);
    pthread_mutex_unlock(&pool->lock);
}

/* Drop waiting jobs, and wait for the threads. Returns 1 if all exited; 0 if some still run after `timeout_s`. */
EXPORT int h5chunk_close(Pool *pool, double timeout_s) {
    struct timespec end = after(timeout_s);
    pthread_mutex_lock(&pool->lock);
    pool->is_closing = 1;
    while (pool->waiting.first) skip_first(pool, CANCELLED);
    pthread_cond_broadcast(&pool->work);
    pthread_cond_broadcast(&pool->done);
    int error = 0;
    while (pool->num_threads && error != ETIMEDOUT) error = pthread_cond_timedwait(&pool->ended, &pool->lock, &end);
    int is_over = !pool->num_threads;
    pthread_mutex_unlock(&pool->lock);
    return is_over;
}

/* Free a closed pool, or let the last running thread free it. No thread may be waiting for the pool. */
EXPORT void h5chunk_free(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->is_left = 1;
    if (!pool->num_threads) free_pool(pool);
    else pthread_mutex_unlock(&pool->lock);
}
