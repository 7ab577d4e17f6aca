/* Copy to a GPU and launch kernels with CUDA's driver library, which is loaded when it is first needed.
 *
 * Handles of contexts, streams, events and functions belong to the caller. Functions return 0 or an error of CUDA, and
 * may be called by any thread; the context of the calling thread stays unchanged. */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#ifndef LIBCUDA
#define LIBCUDA "libcuda.so.1"
#endif

enum { MAX_ARGUMENTS = 16, NOT_LOADED = 3, NOT_READY = 600 }; /* errors of CUDA */

static struct {
    int (*get_context)(void **context);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
    int (*copy)(uint64_t device, const void *host, size_t num_bytes, void *stream);
    int (*launch)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, void *stream,
                  void **arguments, void **extra);
    int (*load_module)(void **module, const void *image);
    int (*find_function)(void **function, void *module, const char *name);
    int (*parameter)(void *function, size_t index, size_t *offset, size_t *num_bytes);
} cuda;
static int is_loaded;
static pthread_once_t cuda_once = PTHREAD_ONCE_INIT;

static void load_cuda(void) {
    static const char *names[] = {"cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuStreamWaitEvent",
                                  "cuEventRecord", "cuEventQuery", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel",
                                  "cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetParamInfo"};
    void *library = dlopen(LIBCUDA, RTLD_NOW), **functions = (void **)&cuda;
    enum { COUNT = sizeof names / sizeof *names };
    is_loaded = library != NULL;
    for (int i = 0; library && i < COUNT; i++) {
        functions[i] = dlsym(library, names[i]);
        if (!functions[i] && i < COUNT - 1) is_loaded = 0; /* old drivers lack the last function */
    }
}

/* Return the context of the calling thread, or NULL. */
EXPORT void *h5chunk_cuda_context(void) {
    void *context = NULL;
    pthread_once(&cuda_once, load_cuda);
    return is_loaded && !cuda.get_context(&context) ? context : NULL;
}

/* Make a stream wait for an event, and then record another event; either may be NULL. */
EXPORT int h5chunk_cuda_order(void *context, void *stream, void *awaited, void *recorded) {
    int error = is_loaded ? cuda.push(context) : NOT_LOADED;
    if (error) return error;
    if (awaited) error = cuda.wait(stream, awaited, 0);
    if (recorded && !error) error = cuda.record(recorded, stream);
    cuda.pop(&context);
    return error;
}

typedef struct {
    uint64_t device;
    const void *host;
    size_t num_bytes;
} Copy;

typedef struct {
    void *context, *stream, *consumed, *copied;
    const Copy *copies;
    int64_t num_copies;
} Sending;

/* Copy to the device on a stream, after the event `consumed`, and then record the event `copied`. */
EXPORT int h5chunk_cuda_send(const Sending *sending) {
    void *context;
    int error = is_loaded ? cuda.push(sending->context) : NOT_LOADED;
    if (error) return error;
    error = cuda.wait(sending->stream, sending->consumed, 0);
    for (int64_t i = 0; i < sending->num_copies && !error; i++) {
        const Copy *copy = sending->copies + i;
        if (copy->num_bytes) error = cuda.copy(copy->device, copy->host, copy->num_bytes, sending->stream);
    }
    if (!error) error = cuda.record(sending->copied, sending->stream);
    cuda.pop(&context);
    return error;
}

/* Return whether the copies have ended, or failed. */
EXPORT int h5chunk_cuda_is_copied(const Sending *sending) {
    void *context;
    if (!is_loaded || cuda.push(sending->context)) return 1;
    int error = cuda.query(sending->copied);
    cuda.pop(&context);
    return error != NOT_READY;
}

typedef struct {
    void *context, *function;
    uint64_t arguments[MAX_ARGUMENTS];
    uint32_t num_threads, shared_bytes; /* per block */
    uint32_t grid_y, grid_z;            /* blocks along the other axes of the grid */
} Launch;

/* Return a function of a module, which is loaded into the context and stays there, or NULL. */
EXPORT void *h5chunk_cuda_load(void *context, const void *image, const char *name) {
    void *module, *function = NULL;
    if (!is_loaded || cuda.push(context)) return NULL;
    if (cuda.load_module(&module, image) || cuda.find_function(&function, module, name)) function = NULL;
    cuda.pop(&context);
    return function;
}

/* Launch a grid of a kernel, whose parameters have 4 or 8 bytes; only the lower bytes of an argument are used if its
 * parameter has 4. */
EXPORT int h5chunk_cuda_launch(const Launch *launch, void *stream, uint32_t num_blocks) {
    void *context, *arguments[MAX_ARGUMENTS];
    int error = is_loaded ? cuda.push(launch->context) : NOT_LOADED;
    if (error) return error;
    for (int i = 0; i < MAX_ARGUMENTS; i++) arguments[i] = (void *)(uintptr_t)&launch->arguments[i];
    error = cuda.launch(launch->function, num_blocks, launch->grid_y, launch->grid_z, launch->num_threads, 1, 1,
                        launch->shared_bytes, stream, arguments, NULL);
    cuda.pop(&context);
    return error;
}

static int is_number(size_t num_bytes) { return num_bytes == 4 || num_bytes == 8; }

/* Return the number of parameters of a kernel, or -1 if it is unknown, or if a parameter has neither 4 nor 8 bytes. */
EXPORT int h5chunk_cuda_parameters(const Launch *launch) {
    void *context;
    int count = 0;
    size_t offset, num_bytes = 8;
    if (!is_loaded || !cuda.parameter || cuda.push(launch->context)) return -1;
    while (count <= MAX_ARGUMENTS && is_number(num_bytes) &&
           !cuda.parameter(launch->function, (size_t)count, &offset, &num_bytes))
        count++;
    cuda.pop(&context);
    return is_number(num_bytes) && count <= MAX_ARGUMENTS ? count : -1;
}
