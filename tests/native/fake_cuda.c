/* Stands for CUDA's driver library in tests: notes what it was asked for, and copies at once or, if told so, late. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { MOST_LATE = 100, LATE_STREAM = 70, ASKED = 3 };
enum { PUSH = 'p', POP = 'q', WAIT = 'w', RECORD = 'r', COPY = 'c', LAUNCH = 'l', MOST = 10000, FAILURE = 719 };

typedef struct {
    int64_t kind, first, second, third;
} Call;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Call calls[MOST];
static int64_t count;
static int failing, is_late, num_late, num_asked;
static struct {
    void *device;
    const void *host;
    size_t num_bytes;
} late[MOST_LATE];

static void copy_now(void) {
    for (int i = 0; i < num_late; i++) memcpy(late[i].device, late[i].host, late[i].num_bytes);
    num_late = 0;
}

/* Let copies be done only when another stream waits for their event, or at the third question about an event. */
void copy_late(int on) {
    pthread_mutex_lock(&lock);
    is_late = on;
    copy_now();
    pthread_mutex_unlock(&lock);
}

/* Let calls of this kind fail, or none if it is 0, and forget the calls so far. */
void fail_cuda(int kind) {
    pthread_mutex_lock(&lock);
    failing = kind;
    count = 0;
    pthread_mutex_unlock(&lock);
}

/* The calls so far, by all threads. */
int64_t cuda_calls(Call *out) {
    pthread_mutex_lock(&lock);
    memcpy(out, calls, (size_t)count * sizeof *calls);
    int64_t found = count;
    pthread_mutex_unlock(&lock);
    return found;
}

static int note(int kind, const void *first, const void *second, int64_t third) {
    pthread_mutex_lock(&lock);
    if (count < MOST) calls[count++] = (Call){kind, (int64_t)first, (int64_t)second, third};
    int fails = failing == kind;
    pthread_mutex_unlock(&lock);
    return fails ? FAILURE : 0;
}

int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuCtxPushCurrent_v2(void *context) { return note(PUSH, context, NULL, 0); }
int cuCtxPopCurrent_v2(void **context) { return *context = NULL, note(POP, NULL, NULL, 0); }

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    pthread_mutex_lock(&lock);
    if (stream != (void *)LATE_STREAM) copy_now();
    pthread_mutex_unlock(&lock);
    return note(WAIT, stream, event, flags);
}

int cuEventQuery(void *event) {
    pthread_mutex_lock(&lock);
    int waits = event && num_late && ++num_asked % ASKED;
    if (!waits) copy_now();
    pthread_mutex_unlock(&lock);
    return waits ? 600 : 0;
}

int cuEventRecord(void *event, void *stream) { return note(RECORD, stream, event, 0); }

int cuMemcpyHtoDAsync_v2(uint64_t device, const void *host, size_t num_bytes, void *stream) {
    int error = note(COPY, stream, (void *)device, (int64_t)num_bytes);
    pthread_mutex_lock(&lock);
    int waits = !error && is_late && num_late < MOST_LATE;
    if (waits) late[num_late].device = (void *)device, late[num_late].host = host, late[num_late++].num_bytes = num_bytes;
    pthread_mutex_unlock(&lock);
    if (!error && !waits) memcpy((void *)device, host, num_bytes);
    return error;
}

/* A kernel of three parameters: the first argument is the address to which the sum of the two others is written. */
int cuLaunchKernel(void *function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned thread_y,
                   unsigned thread_z, unsigned shared, void *stream, void **arguments, void **extra) {
    int error = note(LAUNCH, stream, function, (int64_t)blocks * threads + y + z + thread_y + thread_z + shared);
    int64_t sum = *(int64_t *)arguments[1] + *(int64_t *)arguments[2];
    if (!error && !extra) memcpy(*(void **)arguments[0], &sum, sizeof sum);
    return error;
}

/* A module is its image, which is text: "bad" cannot be loaded, and any other has function 7 with the name "kernel". */
int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return !strcmp(image, "bad");
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)7;
    return !module || strcmp(name, "kernel");
}

int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *num_bytes) {
    *offset = 8 * index;
    *num_bytes = function == (void *)9 && index == 1 ? 2 : function == (void *)8 ? 4 : 8; /* function 8 has numbers of 4 bytes, 9 one of 2 */
    return index < 3 ? 0 : 1;
}
