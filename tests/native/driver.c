/* Drives core.c, rows.c, maps.c and cuda.c as Python does, for the sanitizers: prints nothing and returns 0 if all is well.
 *
 *     cc -fsanitize=address,undefined -Dpread=faulty_pread -Dpreadv=faulty_preadv -c driver.c
 *     cc -fsanitize=address,undefined driver.o faults.c fake_cuda.c -pthread -rdynamic -ldl
 */
#define LIBCUDA NULL /* the functions of fake_cuda.c, in this program */
#include "../../h5chunk/native/core.c"
#include "../../h5chunk/native/cuda.c"
#include "../../h5chunk/native/maps.c"
#include "../../h5chunk/native/rows.c"

#include <stdio.h>
#include <sys/mman.h>

void set_fault(int kind, int from);
int num_calls(void);

enum { NONE, SHORT, INTERRUPTED, REFUSED, HANGING, AT_END }; /* faults.c */
enum { ALL_ROWS = 2101, ROW_BYTES = 201, ROWS_PER_JOB = 1500, TICKETS = 6 };

#define EXPECT(condition)                                                          \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

static uint8_t data[ALL_ROWS * ROW_BYTES];

static int num_sent; /* the number of endings; only the fifth fails */

static int send(const void *argument) {
    EXPECT(argument == data);
    return __atomic_add_fetch(&num_sent, 1, __ATOMIC_SEQ_CST) == 5 ? 77 : 0;
}

typedef struct {
    uint8_t *out;
    int64_t *places;
    struct iovec *vectors;
    Job jobs[ALL_ROWS / ROWS_PER_JOB + 3];
    int num_jobs;
} Window;

/* A window of all rows, shuffled: read, verified, and gathered back into order. */
static Window make_window(int descriptor, uint8_t *back) {
    Window window = {malloc(sizeof data), malloc(ALL_ROWS * sizeof(int64_t)), malloc(ALL_ROWS * sizeof(struct iovec))};
    for (int row = 0; row < ALL_ROWS; row++) {
        window.places[row] = (row * 7LL + 3) % ALL_ROWS;
        window.vectors[row] = (struct iovec){window.out + window.places[row] * ROW_BYTES, ROW_BYTES};
    }
    for (int first = 0; first < ALL_ROWS; first += ROWS_PER_JOB) {
        int count = ALL_ROWS - first < ROWS_PER_JOB ? ALL_ROWS - first : ROWS_PER_JOB;
        int64_t start = (int64_t)first * ROW_BYTES, size = (int64_t)count * ROW_BYTES;
        window.jobs[window.num_jobs++] = (Job){READ, descriptor, start, count, size, window.vectors + first, NULL, NULL,
                                               h5chunk_crc32(data + start, size, 0), 1};
    }
    window.jobs[window.num_jobs++] =
        (Job){VERIFY, descriptor, 0, 0, sizeof data, NULL, NULL, NULL, h5chunk_crc32(data, sizeof data, 0), 1};
    if (back)
        window.jobs[window.num_jobs++] =
            (Job){GATHER, -1, 0, ALL_ROWS, sizeof data, data, window.places, back, 0, 0};
    return window;
}

static void free_window(Window *window) {
    free(window->out);
    free(window->places);
    free(window->vectors);
}

/* Read all rows to places in reverse, one or two at a time, from blocks that lie in the file in reverse, or in its map. */
static void run_rows_of_blocks(int descriptor, const uint8_t *map, int64_t rows_at_a_time, int fault) {
    enum { BLOCK_ROWS = 11, BLOCKS = ALL_ROWS / BLOCK_ROWS, COUNT = BLOCKS * BLOCK_ROWS };
    int64_t blocks[BLOCKS], rows[COUNT], places[COUNT], counts[COUNT], count = 0;
    for (int64_t block = 0; block < BLOCKS; block++) blocks[block] = (BLOCKS - 1 - block) * BLOCK_ROWS * ROW_BYTES;
    for (int64_t row = 0; row < COUNT; count++) {
        int64_t left = BLOCK_ROWS - row % BLOCK_ROWS;
        rows[count] = row;
        counts[count] = left < rows_at_a_time ? left : rows_at_a_time;
        places[count] = COUNT - row - counts[count];
        row += counts[count];
    }
    uint8_t *out = malloc((size_t)COUNT * ROW_BYTES);
    Rows table = {blocks, BLOCK_ROWS, ROW_BYTES, rows, rows_at_a_time == 1 ? NULL : counts, places, out};
    Job jobs[3] = {{0}};
    for (int64_t i = 0; i < 3; i++)
        jobs[i] = (Job){.kind = ROWS, .descriptor = descriptor, .offset = count * i / 3,
                        .count = count * (i + 1) / 3 - count * i / 3, .source = &table, .map = map,
                        .mapped_bytes = sizeof data};
    Result result;
    set_fault(fault, 0);
    h5chunk_run(jobs, 3, &result);
    EXPECT(result.status == DONE);
    EXPECT(fault || num_calls() <= BLOCKS + 2); /* a call for each block, unless a job ends within it */
    set_fault(NONE, 0);
    for (int64_t i = 0; i < count; i++)
        EXPECT(!memcmp(out + places[i] * ROW_BYTES, data + blocks[rows[i] / BLOCK_ROWS] + rows[i] % BLOCK_ROWS * ROW_BYTES,
                       (size_t)(counts[i] * ROW_BYTES)));
    jobs[2].descriptor = -1;
    h5chunk_run(jobs, 3, &result);
    EXPECT(result.status == SYSTEM && result.job == 2);
    free(out);
}

/* Copy a mapped file, also after it was cut short: within a page, the rest of which is zeros then, and before. */
static void run_maps(int descriptor, const char *path) {
    uint8_t *map = mmap(NULL, sizeof data, PROT_READ, MAP_SHARED, descriptor, 0), *out = malloc(sizeof data);
    EXPECT(map != MAP_FAILED);
    for (int64_t most = 1; most < 64; most++) { /* rows that begin at any address */
        run_rows_of_blocks(descriptor, map, most, h5chunk_can_map() ? REFUSED : NONE);
    }
    int64_t first = 0, row = 0, end = sizeof data;
    Rows table = {&first, 1, 1, &row, &end, &row, out};
    Job job = {.kind = ROWS, .descriptor = descriptor, .count = 1, .source = &table, .map = map, .mapped_bytes = end};
    Result result;
    h5chunk_run(&job, 1, &result);
    EXPECT(result.status == DONE && !memcmp(out, data, sizeof data));
    job.mapped_bytes--; /* a row that ends behind the map is read in another way */
    h5chunk_run(&job, 1, &result);
    EXPECT(result.status == DONE);
    job.mapped_bytes++;
    for (int64_t left = end - 1; left > 0; left = left > 5 ? left / 2 : left - 1) {
        EXPECT(!truncate(path, left));
        h5chunk_run(&job, 1, &result);
        EXPECT(result.status == CUT_SHORT && result.offset == left);
    }
    EXPECT(pwrite(descriptor, data, sizeof data, 0) == sizeof data);
    EXPECT(!munmap(map, sizeof data));
    char far_path[] = "/tmp/h5chunk-driver-XXXXXX"; /* rows far from the beginning of a file, at an odd address */
    int far = mkstemp(far_path);
    first = (1LL << 32) + 77;
    job.mapped_bytes = first + end;
    EXPECT(far >= 0 && pwrite(far, data, sizeof data, first) == sizeof data);
    job.map = map = mmap(NULL, (size_t)job.mapped_bytes, PROT_READ, MAP_SHARED, job.descriptor = far, 0);
    EXPECT(map != MAP_FAILED);
    memset(out, 0, sizeof data);
    h5chunk_run(&job, 1, &result);
    EXPECT(result.status == DONE && !memcmp(out, data, sizeof data));
    EXPECT(!munmap(map, (size_t)job.mapped_bytes) && !unlink(far_path));
    free(out);
}

/* What is cancelled ends, and the pool reads on. */
static void run_cancelled(int descriptor) {
    Window windows[TICKETS];
    Pool *pool = h5chunk_open(3, 50000, 0);
    Result result;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < TICKETS; i++) {
            windows[i] = make_window(descriptor, NULL);
            EXPECT(!h5chunk_submit(pool, (uint64_t)i, windows[i].jobs, windows[i].num_jobs, NULL, NULL));
        }
        if (!round) h5chunk_cancel(pool);
        for (int i = 0; i < TICKETS; i++) {
            EXPECT(h5chunk_wait(pool, 20, &result) == 1);
            EXPECT(result.status == DONE || (!round && result.status == CANCELLED));
        }
        EXPECT(!h5chunk_num_open(pool));
        for (int i = 0; i < TICKETS; i++) free_window(windows + i);
    }
    EXPECT(h5chunk_close(pool, 20));
    h5chunk_free(pool);
}

/* Rows of memory. */
static void run_gathered(void) {
    int64_t indices[ALL_ROWS];
    uint8_t out[TICKETS][ALL_ROWS * ROW_BYTES];
    Job jobs[TICKETS];
    Pool *pool = h5chunk_open(1, 1, 0);
    Result result;
    for (int64_t i = 0; i < ALL_ROWS; i++) indices[i] = (i * 7) % ALL_ROWS;
    for (int i = 0; i < TICKETS; i++) {
        jobs[i] = (Job){.kind = GATHER, .count = ALL_ROWS, .num_bytes = ALL_ROWS * ROW_BYTES, .source = data,
                        .indices = indices, .destination = out[i]};
        EXPECT(!h5chunk_submit(pool, (uint64_t)i, jobs + i, 1, NULL, NULL));
    }
    for (int i = 0; i < TICKETS; i++) {
        EXPECT(h5chunk_wait(pool, 20, &result) == 1 && result.status == DONE);
        for (int row = 0; row < ALL_ROWS; row++)
            EXPECT(!memcmp(out[result.ticket] + row * ROW_BYTES, data + indices[row] * ROW_BYTES, ROW_BYTES));
    }
    EXPECT(h5chunk_close(pool, 20));
    h5chunk_free(pool);
}

/* Endings: what is sent, what is not because a job failed, or the file changed, or because sending fails. */
static void run_endings(int descriptor, const char *path) {
    struct stat found;
    EXPECT(!stat(path, &found));
    Ending same = {send, data, path, (int64_t)found.st_dev, (int64_t)found.st_ino, found.st_size,
                   found.st_mtim.tv_sec * 1000000000LL + found.st_mtim.tv_nsec};
    Ending changed = same, gone = same;
    changed.modified_ns++;
    gone.path = "/nowhere";
    const Ending *endings[] = {&same, &changed, &gone, &same};
    int expected[] = {DONE, CHANGED, CHANGED, SYSTEM};
    Pool *pool = h5chunk_open(3, 50000, 0);
    Result result;
    for (int round = 0; round < 5; round++) {
        Window windows[4];
        int before = num_sent;
        for (int i = 0; i < 4; i++) {
            windows[i] = make_window(descriptor, NULL);
            if (i == 3) windows[i].jobs[1].descriptor = -1;
            EXPECT(!h5chunk_submit(pool, (uint64_t)i, windows[i].jobs, windows[i].num_jobs, endings[i], NULL));
        }
        for (int i = 0; i < 4; i++) {
            EXPECT(h5chunk_wait(pool, 20, &result) == 1);
            int fails = round == 4 && result.ticket == 0;
            EXPECT(result.status == (fails ? NOT_SENT : expected[result.ticket]) && (!fails || result.error == 77));
        }
        EXPECT(num_sent == before + 1);
        for (int i = 0; i < 4; i++) free_window(windows + i);
    }
    EXPECT(h5chunk_close(pool, 20));
    h5chunk_free(pool);
}

enum { BUFFERS = 2, SHARING = 12 };
static uint8_t device_memory[SHARING][sizeof data];

typedef struct {
    const uint8_t *host;
    uint8_t *device;
    int num_asked;
} LateCopy;

/* The copy is done only when it is asked for the third time. */
static int copy_late(const void *argument) {
    LateCopy *copy = (LateCopy *)argument;
    if (++copy->num_asked < 3) return 0;
    if (copy->num_asked == 3) memcpy(copy->device, copy->host, sizeof data);
    return 1;
}

static int start_copy(const void *argument) { return ((const LateCopy *)argument)->num_asked ? 78 : 0; }

/* Tickets that share buffers take turns: none begins before the copy of the previous one is done. */
static void run_turns(int descriptor, int num_threads, int is_cancelled) {
    Window windows[SHARING];
    Ending endings[SHARING];
    LateCopy copies[SHARING];
    Buffer buffers[BUFFERS] = {{copy_late, NULL, 0}, {copy_late, NULL, 0}};
    Pool *pool = h5chunk_open(num_threads, 50000, 0);
    Result result;
    for (int i = 0; i < SHARING; i++) windows[i] = make_window(descriptor, NULL);
    for (int i = 0; i < SHARING; i++) { /* every window gets its own rotation of the rows, in a shared array */
        uint8_t *shared = windows[i % BUFFERS].out;
        for (int row = 0; row < ALL_ROWS; row++)
            windows[i].vectors[row] = (struct iovec){shared + (row + i) % ALL_ROWS * ROW_BYTES, ROW_BYTES};
        copies[i] = (LateCopy){shared, device_memory[i], 0};
        endings[i] = (Ending){start_copy, copies + i, NULL, 0, 0, 0, 0};
        EXPECT(!h5chunk_submit(pool, (uint64_t)i, windows[i].jobs, windows[i].num_jobs, endings + i, buffers + i % BUFFERS));
    }
    if (is_cancelled) h5chunk_cancel(pool);
    for (int i = 0; i < SHARING; i++) {
        EXPECT(h5chunk_wait(pool, 20, &result) == 1);
        EXPECT(result.status == DONE || (is_cancelled && result.status == CANCELLED));
    }
    EXPECT(!buffers[0].is_taken && !buffers[1].is_taken);
    for (int i = 0; i < SHARING && !is_cancelled; i++) {
        while (!copy_late(copies + i)) continue;
        for (int row = 0; row < ALL_ROWS; row++)
            EXPECT(!memcmp(device_memory[i] + (row + i) % ALL_ROWS * ROW_BYTES, data + row * ROW_BYTES, ROW_BYTES));
    }
    EXPECT(h5chunk_close(pool, 20));
    h5chunk_free(pool);
    for (int i = 0; i < SHARING; i++) free_window(windows + i);
}

/* Threads send windows to a device, which is memory here, in two copies each. */
static void run_sending(int descriptor) {
    Window windows[TICKETS];
    Sending sendings[TICKETS];
    Copy copies[TICKETS][2];
    Ending endings[TICKETS];
    Pool *pool = h5chunk_open(3, 50000, 0);
    Result result;
    for (int i = 0; i < TICKETS; i++) {
        windows[i] = make_window(descriptor, NULL);
        uint8_t *device = malloc(sizeof data);
        copies[i][0] = (Copy){(uint64_t)device, windows[i].out, ROW_BYTES};
        copies[i][1] = (Copy){(uint64_t)(device + ROW_BYTES), windows[i].out + ROW_BYTES, sizeof data - ROW_BYTES};
        sendings[i] = (Sending){h5chunk_cuda_context(), (void *)5, (void *)6, (void *)7, copies[i], 2};
        endings[i] = (Ending){(int (*)(const void *))h5chunk_cuda_send, sendings + i, NULL, 0, 0, 0, 0};
        EXPECT(!h5chunk_submit(pool, (uint64_t)i, windows[i].jobs, windows[i].num_jobs, endings + i, NULL));
    }
    for (int i = 0; i < TICKETS; i++) {
        EXPECT(h5chunk_wait(pool, 20, &result) == 1 && result.status == DONE);
        uint8_t *device = (uint8_t *)copies[result.ticket][0].device;
        EXPECT(!memcmp(device, windows[result.ticket].out, sizeof data));
        EXPECT(!h5chunk_cuda_order(h5chunk_cuda_context(), (void *)8, (void *)7, (void *)6));
        free(device);
        free_window(windows + result.ticket);
    }
    EXPECT(h5chunk_close(pool, 20));
    h5chunk_free(pool);
}

static int run_pool(int descriptor, int threads, int fault, int from, int is_closed_early) {
    uint8_t *back = malloc(sizeof data);
    Window windows[TICKETS];
    Pool *pool = h5chunk_open(threads, 50000, 0);
    EXPECT(pool);
    set_fault(fault, from);
    for (int i = 0; i < TICKETS; i++) {
        windows[i] = make_window(descriptor, i ? NULL : back);
        EXPECT(!h5chunk_submit(pool, (uint64_t)i, windows[i].jobs, windows[i].num_jobs, NULL, NULL));
    }
    if (is_closed_early) {
        h5chunk_close(pool, 0.02);
        set_fault(NONE, 0);
        EXPECT(h5chunk_submit(pool, 99, windows[0].jobs, 1, NULL, NULL) == -1);
    }
    int seen = 0, status = DONE;
    Result result;
    for (int state; seen < TICKETS; seen += state) {
        EXPECT((state = h5chunk_wait(pool, 20, &result)) == 1);
        if (result.status) status = result.status;
        else if (!is_closed_early)
            for (int row = 0; row < ALL_ROWS; row++)
                EXPECT(!memcmp(windows[result.ticket].out + windows[result.ticket].places[row] * ROW_BYTES,
                               data + row * ROW_BYTES, ROW_BYTES));
    }
    EXPECT(h5chunk_wait(pool, 0.001, &result) == (is_closed_early ? -1 : 0));
    EXPECT(h5chunk_close(pool, 20) && h5chunk_close(pool, 20));
    h5chunk_free(pool);
    for (int i = 0; i < TICKETS; i++) free_window(windows + i);
    free(back);
    set_fault(NONE, 0);
    return status;
}

/* Copy rows of a matrix, some of which follow each other, and make them dense, with all sizes of numbers. */
static void run_rows(int column_bytes, int value_bytes, int index_bytes, int has_codes, int has_table) {
    enum { MATRIX_ROWS = 30, COLUMNS = 90, TAKEN = 20 };
    int64_t starts[MATRIX_ROWS + 1] = {0}, rows[TAKEN], num_taken = 0;
    for (int row = 0; row < MATRIX_ROWS; row++) starts[row + 1] = starts[row] + row % 7 * 5;
    for (int i = 0; i < TAKEN; i++) rows[i] = i < 9 ? i + 4 : (i * 11) % MATRIX_ROWS, num_taken += rows[i] % 7 * 5;
    int64_t count = starts[MATRIX_ROWS], size = value_bytes;
    void *columns = malloc((size_t)(count * column_bytes)), *table = malloc((size_t)(256 * size));
    void *codes = malloc((size_t)(count * (has_table ? 1 : size))), *dense = malloc((size_t)(TAKEN * COLUMNS * size));
    for (int64_t row = 0, i = 0; row < MATRIX_ROWS; row++)
        for (; i < starts[row + 1]; i++) store(columns, i, column_bytes, 3 * (i - starts[row]));
    for (int64_t i = 0; i < count; i++) store(codes, i, has_table ? 1 : value_bytes, i % 100 + 1);
    for (int i = 0; i < 256; i++) store(table, i, value_bytes, i / 2 + 1);
    Matrix matrix = {starts, columns, has_codes ? codes : NULL, has_table ? table : NULL, COLUMNS, column_bytes, value_bytes};
    void *ends = malloc((size_t)((TAKEN + 1) * index_bytes)), *out = malloc((size_t)(num_taken * index_bytes));
    void *values = malloc((size_t)(num_taken * size));
    h5chunk_entries(&matrix, rows, TAKEN, index_bytes, ends, out, values);
    enum { MOST_SET = 20 };
    int32_t set[TAKEN][1 + MOST_SET];
    memset(dense, 77, (size_t)(TAKEN * COLUMNS * size));
    for (int i = 0; i < TAKEN; i++) set[i][0] = -1;
    for (int first = TAKEN - 1; first >= 0; first--) /* each row is filled again and again */
        EXPECT(!h5chunk_dense(&matrix, rows + first, TAKEN - first, dense, set[0], MOST_SET));
    for (int64_t i = 0, entry = 0; i < TAKEN; i++) {
        EXPECT(load(ends, i, index_bytes) == (uint64_t)entry);
        for (int64_t from = starts[rows[i]]; from < starts[rows[i] + 1]; from++, entry++) {
            uint64_t code = has_codes ? (uint64_t)from % 100 + 1 : 0, value = has_table ? code / 2 + 1 : code;
            EXPECT(load(out, entry, index_bytes) == load(columns, from, column_bytes));
            EXPECT(load(values, entry, value_bytes) == value);
            EXPECT(load(dense, i * COLUMNS + (int64_t)load(out, entry, index_bytes), value_bytes) == value);
        }
        int64_t num_set = 0;
        for (int column = 0; column < COLUMNS; column++) num_set += !!load(dense, i * COLUMNS + column, value_bytes);
        EXPECT(num_set == rows[i] % 7 * 5 && set[i][0] == (num_set > MOST_SET ? -1 : num_set));
    }
    matrix.num_columns = 10;
    EXPECT(h5chunk_dense(&matrix, rows, TAKEN, dense, set[0], MOST_SET) == -1);
    int64_t none[2] = {0}, row = 0;
    Matrix empty = {none, NULL, NULL, table, COLUMNS, column_bytes, value_bytes};
    h5chunk_entries(&empty, &row, 1, index_bytes, ends, NULL, NULL);
    EXPECT(load(ends, 1, index_bytes) == 0);
    void *memory[] = {columns, table, codes, dense, ends, out, values};
    for (int i = 0; i < 7; i++) free(memory[i]);
}

/* Copy boxes of a 3-D array to two others, of which the second is complete along the last axis. */
static void run_boxes(void) {
    enum { DEPTH = 3, HEIGHT = 20, WIDTH = 7 };
    uint16_t *from = malloc(DEPTH * HEIGHT * WIDTH * sizeof *from), *to = calloc(2 * 2 * 13 * WIDTH, sizeof *to);
    int64_t from_shape[] = {DEPTH, HEIGHT, WIDTH}, to_shape[] = {2, 13, WIDTH};
    int64_t boxes[] = {1, 1, 8, 2, 0, 1, 3, 2, 12, 4, /* */ 0, 0, 7, 0, 0, 0, 0, 2, 13, WIDTH};
    for (int i = 0; i < DEPTH * HEIGHT * WIDTH; i++) from[i] = (uint16_t)(i + 1);
    h5chunk_copy_boxes((uint8_t *)from, from_shape, 3, sizeof *from, boxes, 2, (uint8_t *)to, to_shape);
    for (int z = 0; z < 2; z++)
        for (int y = 0; y < 13; y++)
            for (int x = 0; x < WIDTH; x++) {
                EXPECT(to[(z * 13 + y) * WIDTH + x] == from[(z * HEIGHT + y + 7) * WIDTH + x]);
                int inside = y >= 1 && x >= 3;
                uint16_t expected = inside ? from[((z + 1) * HEIGHT + y + 7) * WIDTH + x - 1] : 0;
                EXPECT(to[((2 + z) * 13 + y) * WIDTH + x] == expected);
            }
    free(from);
    free(to);
}

int main(void) {
    for (int i = 0; i < 4 * 4 * 2 * 3; i++)
        run_rows(1 << i % 4, 1 << i / 4 % 4, i / 16 % 2 ? 8 : 4, i / 32 != 2, i / 32 != 1);
    run_boxes();
    char path[] = "/tmp/h5chunk-driver-XXXXXX";
    int descriptor = mkstemp(path);
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * i >> 7);
    EXPECT(descriptor >= 0 && write(descriptor, data, sizeof data) == sizeof data);
    run_endings(descriptor, path);
    run_sending(descriptor);
    for (int i = 0; i < 6; i++) run_turns(descriptor, 1 + i % 3 * 2, i / 3);
    run_maps(descriptor, path);
    EXPECT(!unlink(path));
    EXPECT(h5chunk_crc32((const uint8_t *)"123456789", 9, 0) == 0xCBF43926u);
    for (int fault = NONE; fault <= INTERRUPTED; fault++) {
        run_rows_of_blocks(descriptor, NULL, 1, fault);
        run_rows_of_blocks(descriptor, NULL, 2, fault);
    }
    run_cancelled(descriptor);
    run_gathered();
    for (int threads = 1; threads < 6; threads += 2) {
        EXPECT(run_pool(descriptor, threads, NONE, 0, 0) == DONE);
        EXPECT(run_pool(descriptor, threads, SHORT, 0, 0) == DONE);
        EXPECT(run_pool(descriptor, threads, INTERRUPTED, 0, 0) == DONE);
        EXPECT(run_pool(descriptor, threads, REFUSED, 5, 0) == SYSTEM);
        EXPECT(run_pool(descriptor, threads, AT_END, 0, 0) == CUT_SHORT);
        run_pool(descriptor, threads, NONE, 0, 1);
        run_pool(descriptor, threads, HANGING, 0, 1);
    }
    data[1000] ^= 1; /* the checksums are of other bytes than the file has */
    EXPECT(run_pool(descriptor, 2, NONE, 0, 0) == CHECKSUM);
    /* A pool that is given back while threads hang in reads frees itself. */
    data[1000] ^= 1;
    static Window window; /* never freed: the threads may write to it until the end */
    window = make_window(descriptor, NULL);
    Pool *pool = h5chunk_open(2, 1, 0);
    set_fault(HANGING, 0);
    EXPECT(!h5chunk_submit(pool, 1, window.jobs, window.num_jobs, NULL, NULL));
    usleep(20000);
    EXPECT(!h5chunk_close(pool, 0.01));
    h5chunk_free(pool);
    set_fault(NONE, 0);
    usleep(200000);
    return 0;
}
