/* Stands between core.c and the system in tests: reads that are short, interrupted, refused, or hang. */
#include <errno.h>
#include <stdatomic.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NONE, SHORT, INTERRUPTED, REFUSED, HANGING, EMPTY };

static atomic_int mode, calls, refused_from;

void set_fault(int kind, int from) {
    atomic_store(&calls, 0);
    atomic_store(&refused_from, from);
    atomic_store(&mode, kind);
}

/* Number of calls since the fault was set. */
int num_calls(void) { return atomic_load(&calls); }

/* What to do instead of reading: 0 to read. */
static int instead(void) {
    int call = atomic_fetch_add(&calls, 1);
    while (atomic_load(&mode) == HANGING) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    if (atomic_load(&mode) == INTERRUPTED && call % 2 == 0) return EINTR;
    return atomic_load(&mode) == REFUSED && call >= atomic_load(&refused_from) ? EIO : 0;
}

ssize_t faulty_pread(int descriptor, void *out, size_t length, off_t offset) {
    if ((errno = instead())) return -1;
    if (atomic_load(&mode) == EMPTY) return 0;
    return pread(descriptor, out, atomic_load(&mode) == SHORT && length > 50 ? 50 : length, offset);
}

ssize_t faulty_preadv(int descriptor, const struct iovec *vectors, int count, off_t offset) {
    if ((errno = instead())) return -1;
    if (atomic_load(&mode) == EMPTY) return 0;
    if (atomic_load(&mode) != SHORT) return preadv(descriptor, vectors, count, offset);
    return pread(descriptor, vectors->iov_base, vectors->iov_len / 2, offset);
}
