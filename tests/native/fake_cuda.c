/* Stands for CUDA's driver library in tests: copies at once, and notes what it was asked for. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { PUSH = 'p', POP = 'q', WAIT = 'w', RECORD = 'r', COPY = 'c', LAUNCH = 'l', MOST = 10000, FAILURE = 719 };

typedef struct {
    int64_t kind, first, second, third;
} Call;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Call calls[MOST];
static int64_t count;
static int failing;

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
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return note(WAIT, stream, event, flags); }
int cuEventRecord(void *event, void *stream) { return note(RECORD, stream, event, 0); }

int cuMemcpyHtoDAsync_v2(uint64_t device, const void *host, size_t num_bytes, void *stream) {
    int error = note(COPY, stream, (void *)device, (int64_t)num_bytes);
    if (!error) memcpy((void *)device, host, num_bytes);
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

int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *num_bytes) {
    *offset = 8 * index;
    *num_bytes = function == (void *)9 && index == 1 ? 2 : function == (void *)8 ? 4 : 8; /* function 8 has numbers of 4 bytes, 9 one of 2 */
    return index < 3 ? 0 : 1;
}
