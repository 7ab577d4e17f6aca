/* Copy bytes of files that are mapped to memory.
 *
 * This takes half to two thirds of the processor time of `preadv`: the kernel's copy loads each line of the destination
 * before it overwrites it. But if a file is cut short, or its disk fails, access to a page that cannot be read raises the
 * signal SIGBUS, which ends a process. Here, a handler of this signal ends only the copy.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>

#include "maps.h"

#define EXPORT __attribute__((visibility("default")))

#if defined(__linux__) && defined(__x86_64__) /* elsewhere, nobody has measured whether maps are faster */
#include <immintrin.h>

enum { LINE = 64 };

static struct sigaction previous; /* the handler before ours */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t jump_key; /* where a thread continues after the signal; NULL if it is not copying */
static int is_installed;

static void on_signal(int number, siginfo_t *info, void *context) {
    sigjmp_buf *jump = pthread_getspecific(jump_key);
    if (jump && info->si_code != SI_USER) siglongjmp(*jump, 1);
    if (previous.sa_flags & SA_SIGINFO) previous.sa_sigaction(number, info, context);
    else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) previous.sa_handler(number);
    else if (info->si_code > 0 || previous.sa_handler == SIG_DFL) {
        signal(number, SIG_DFL); /* the failed access is repeated, and ends the process */
        if (info->si_code <= 0) raise(number);
    }
}

static void install(void) {
    struct sigaction ours = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    is_installed = !pthread_key_create(&jump_key, NULL) && !sigaction(SIGBUS, NULL, &previous) &&
                   !sigaction(SIGBUS, &ours, NULL);
}

/* Install the handler, once. Returns whether it is in place: others may have replaced it, and are not replaced in turn. */
EXPORT int h5chunk_can_map(void) {
    struct sigaction now;
    pthread_once(&once, install);
    return is_installed && !sigaction(SIGBUS, NULL, &now) && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_signal;
}

int h5chunk_guarded(int (*copy)(void *), void *argument) {
    sigjmp_buf jump;
    volatile int result = -1; /* a jump keeps it */
    if (!h5chunk_can_map()) return -1;
    if (!sigsetjmp(jump, 1)) { /* 1: the jump unblocks the signal again */
        pthread_setspecific(jump_key, &jump);
        result = copy(argument);
    }
    pthread_setspecific(jump_key, NULL);
    _mm_sfence();
    return result;
}

__attribute__((target("avx2"))) static int64_t stream_lines(uint8_t *to, const uint8_t *from, int64_t num_bytes) {
    int64_t i = 0;
    for (; i + LINE <= num_bytes; i += LINE) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(from + i));
        __m256i high = _mm256_loadu_si256((const __m256i *)(from + i + LINE / 2));
        _mm256_stream_si256((__m256i *)(to + i), low);
        _mm256_stream_si256((__m256i *)(to + i + LINE / 2), high);
    }
    return i;
}

static int64_t stream_lines_by_16(uint8_t *to, const uint8_t *from, int64_t num_bytes) {
    int64_t i = 0;
    for (; i + LINE <= num_bytes; i += LINE)
        for (int64_t j = i; j < i + LINE; j += 16)
            _mm_stream_si128((__m128i *)(to + j), _mm_loadu_si128((const __m128i *)(from + j)));
    return i;
}

void h5chunk_stream(uint8_t *to, const uint8_t *from, int64_t num_bytes) {
    int64_t head = -(intptr_t)to & (LINE - 1), done = 0;
    if (num_bytes >= 4 * LINE) {
        memcpy(to, from, (size_t)head);
        done = head + (__builtin_cpu_supports("avx2") ? stream_lines : stream_lines_by_16)(to + head, from + head,
                                                                                             num_bytes - head);
    }
    memcpy(to + done, from + done, (size_t)(num_bytes - done));
}
#else
EXPORT int h5chunk_can_map(void) { return 0; }

int h5chunk_guarded(int (*copy)(void *), void *argument) { return (void)copy, (void)argument, -1; }

void h5chunk_stream(uint8_t *to, const uint8_t *from, int64_t num_bytes) { memcpy(to, from, (size_t)num_bytes); }
#endif
