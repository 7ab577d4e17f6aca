/* Copies of mapped files, which a truncated file ends instead of the process. */
#include <stdint.h>

/* Call `copy`, and then wait until what it has stored is visible to other threads. Returns its result; or -1 if a page of a
 * mapped file could not be read, or if that would end the process. */
int h5chunk_guarded(int (*copy)(void *), void *argument);

/* Copy bytes past the processor's caches. */
void h5chunk_stream(uint8_t *to, const uint8_t *from, int64_t num_bytes);
