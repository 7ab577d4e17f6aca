/* HDF5's filters, which turn a stored block into the bytes of its elements. */
#include <stddef.h>
#include <stdint.h>

enum { MAX_FILTERS = 8 };

typedef struct {
    int64_t code, parameter; /* HDF5's number of the filter; for byte shuffle, the bytes of an element */
} Filter;

/* The filters of a dataset, in the order in which they were applied. */
typedef struct {
    int64_t count;
    Filter filters[MAX_FILTERS];
} Pipeline;

/* Functions of libdeflate, zlib (which is used without libdeflate), LZ4 and Zstandard; NULL if a library is missing. */
typedef struct {
    void *(*open_inflater)(void);
    void (*close_inflater)(void *);
    int (*inflate)(void *, const void *, size_t, void *, size_t, size_t *, size_t *);
    int (*uncompress)(uint8_t *, unsigned long *, const uint8_t *, unsigned long *);
    int (*unlz4)(const char *, char *, int, int);
    void *(*open_zstd)(void);
    size_t (*close_zstd)(void *);
    size_t (*unzstd)(void *, void *, size_t, const void *, size_t);
} Libraries;

/* What a thread needs to decode blocks: all zeros at first. */
typedef struct {
    uint8_t *memory[4]; /* for the stored block, two for what lies between filters, and for the decoded block */
    int64_t sizes[4];
    void *inflater, *zstd;
    int64_t worked; /* nanoseconds for which blocks were decoded */
} Coder;

uint8_t *h5chunk_stored(Coder *, int64_t num_bytes);
uint8_t *h5chunk_decoded(Coder *, int64_t num_bytes);
int h5chunk_decode_block(Coder *, const Pipeline *, int64_t mask, const uint8_t *data, int64_t length, uint8_t *out,
                         int64_t num_bytes);
void h5chunk_free_coder(Coder *);
