/* Reverse filters of HDF5: gzip, byte shuffle, Fletcher-32, LZF, LZ4 and Zstandard. gzip, LZ4 and Zstandard are left to
 * libraries that this process has loaded. No function writes or reads beyond its buffers, whatever the data is. */

#include "filters.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define BLOCK 256 /* elements whose bytes are moved together, so that they stay in the cache */

enum { GZIP = 1, SHUFFLE = 2, FLETCHER32 = 3, LZF = 32000, LZ4 = 32004, ZSTD = 32015 }; /* HDF5's numbers of filters */
enum { SLACK_BYTES = 64 << 10 }; /* for headers of small chunks */

static Libraries libraries;

/* Set the functions that the decoders call. */
EXPORT void h5chunk_set_libraries(const Libraries *found) { libraries = *found; }

/* Put the bytes of `count` elements of `size` bytes together again. `from` has their first bytes, then their second. */
EXPORT void h5chunk_unshuffle(const uint8_t *restrict from, uint8_t *restrict to, int64_t size, int64_t count) {
    for (int64_t first = 0; first < count; first += BLOCK) {
        int64_t end = first + BLOCK < count ? first + BLOCK : count;
        if (size == 4)
            for (int64_t i = first; i < end; i++) {
                to[4 * i] = from[i];
                to[4 * i + 1] = from[count + i];
                to[4 * i + 2] = from[2 * count + i];
                to[4 * i + 3] = from[3 * count + i];
            }
        else if (size == 2)
            for (int64_t i = first; i < end; i++) {
                to[2 * i] = from[i];
                to[2 * i + 1] = from[count + i];
            }
        else
            for (int64_t byte = 0; byte < size; byte++)
                for (int64_t i = first; i < end; i++) to[size * i + byte] = from[count * byte + i];
    }
}

static uint32_t fold(uint32_t sum) { return (sum & 0xffff) + (sum >> 16); }

/* Return the Fletcher-32 checksum as HDF5 computes it: of big-endian words, with a zero after an odd last byte. */
EXPORT uint32_t h5chunk_fletcher32(const uint8_t *data, int64_t length) {
    uint32_t first = 0, second = 0;
    int64_t words = length / 2;
    while (words) {
        int64_t block = words < 360 ? words : 360; /* so few words cannot overflow 32 bits */
        words -= block;
        for (; block; block--, data += 2) {
            first += (uint32_t)data[0] << 8 | data[1];
            second += first;
        }
        first = fold(first), second = fold(second);
    }
    if (length % 2) {
        first += (uint32_t)data[0] << 8;
        second += first;
        first = fold(first), second = fold(second);
    }
    return fold(second) << 16 | fold(first);
}

/* Decode LZF data, and return the decoded length, or -1 if the data is damaged or exceeds `room` bytes.

   A control byte below 32 precedes that many bytes plus 1, which are copied. In any other, the upper three bits are the
   length of a match minus 2, to which the next byte is added if all three are set. The lower five bits and the next byte
   are the distance of the match minus 1. */
EXPORT int64_t h5chunk_unlzf(const uint8_t *data, int64_t length, uint8_t *out, int64_t room) {
    int64_t at = 0, done = 0;
    while (at < length) {
        int64_t control = data[at++];
        if (control < 32) {
            int64_t count = control + 1;
            if (count > length - at || count > room - done) return -1;
            memcpy(out + done, data + at, (size_t)count);
            at += count, done += count;
            continue;
        }
        int64_t count = control >> 5;
        if (count == 7) {
            if (at == length) return -1;
            count += data[at++];
        }
        if (at == length) return -1;
        int64_t distance = ((control & 31) << 8 | data[at++]) + 1;
        count += 2;
        if (distance > done || count > room - done) return -1;
        if (distance >= count)
            memcpy(out + done, out + done - distance, (size_t)count);
        else
            for (int64_t i = 0; i < count; i++) out[done + i] = out[done + i - distance];
        done += count;
    }
    return done;
}

static uint64_t big_endian(const uint8_t *data, int num_bytes) {
    uint64_t value = 0;
    while (num_bytes--) value = value << 8 | *data++;
    return value;
}

/* Decode one zlib stream, and return the decoded length, or -1. */
static int64_t ungzip(Coder *coder, const uint8_t *data, int64_t length, uint8_t *out, int64_t room) {
    if (libraries.inflate) {
        size_t used = 0, done = 0;
        if (!coder->inflater && !(coder->inflater = libraries.open_inflater())) return -1;
        int failed = libraries.inflate(coder->inflater, data, (size_t)length, out, (size_t)room, &used, &done);
        return failed || used != (size_t)length ? -1 : (int64_t)done;
    }
    unsigned long done = (unsigned long)room, used = (unsigned long)length;
    if (!libraries.uncompress || libraries.uncompress(out, &done, data, &used)) return -1;
    return used != (unsigned long)length ? -1 : (int64_t)done;
}

/* Decode blocks as HDF5's filter LZ4 stores them: a header with the decoded length and the length of a block; and each
 * block with its stored length, which equals the decoded length if the block is not compressed. */
static int64_t unlz4(const uint8_t *data, int64_t length, uint8_t *out, int64_t room) {
    if (length < 12) return -1;
    uint64_t decoded = big_endian(data, 8), block = big_endian(data + 8, 4);
    if (!decoded || decoded > (uint64_t)room || !block || block > INT32_MAX) return -1;
    int64_t total = (int64_t)decoded, at = 12;
    for (int64_t done = 0; done < total;) {
        int64_t size = total - done < (int64_t)block ? total - done : (int64_t)block;
        if (length - at < 4) return -1;
        int64_t stored = (int64_t)big_endian(data + at, 4);
        at += 4;
        if (stored < 1 || stored > length - at) return -1;
        if (stored == size) memcpy(out + done, data + at, (size_t)size);
        else if (libraries.unlz4((const char *)data + at, (char *)out + done, (int)stored, (int)size) != size) return -1;
        at += stored, done += size;
    }
    return at == length ? total : -1;
}

static int64_t unzstd(Coder *coder, const uint8_t *data, int64_t length, uint8_t *out, int64_t room) {
    static const uint8_t magic[] = {0x28, 0xb5, 0x2f, 0xfd};
    if (length < 4 || memcmp(data, magic, sizeof magic)) return -1;
    if (!coder->zstd && !(coder->zstd = libraries.open_zstd())) return -1;
    size_t done = libraries.unzstd(coder->zstd, out, (size_t)room, data, (size_t)length);
    return done > (size_t)room ? -1 : (int64_t)done; /* errors are very large numbers */
}

/* Undo the shuffle filter, which leaves bytes after the last whole element as they are. */
static int64_t unshuffle(const uint8_t *data, int64_t length, int64_t item, uint8_t *out, int64_t room) {
    if (item < 1 || length > room) return -1;
    int64_t count = length / item, whole = count * item;
    h5chunk_unshuffle(data, out, item, count);
    memcpy(out + whole, data + whole, (size_t)(length - whole));
    return length;
}

/* Return whether the checksum at the end of a block is right. HDF5 up to 1.6.2 swapped the bytes of both its halves. */
static int is_intact(const uint8_t *data, int64_t length) {
    uint32_t found = data[length - 4] | (uint32_t)data[length - 3] << 8 | (uint32_t)data[length - 2] << 16 |
                     (uint32_t)data[length - 1] << 24;
    uint32_t sum = h5chunk_fletcher32(data, length - 4);
    return found == sum || found == ((sum & 0x00ff00ff) << 8 | (sum >> 8 & 0x00ff00ff));
}

/* Return memory of the calling thread, or NULL. */
static uint8_t *memory_of(Coder *coder, int which, int64_t num_bytes) {
    if (coder->sizes[which] < num_bytes) {
        free(coder->memory[which]);
        coder->memory[which] = malloc((size_t)num_bytes);
        coder->sizes[which] = coder->memory[which] ? num_bytes : 0;
    }
    return coder->memory[which];
}

uint8_t *h5chunk_stored(Coder *coder, int64_t num_bytes) { return memory_of(coder, 0, num_bytes); }
uint8_t *h5chunk_decoded(Coder *coder, int64_t num_bytes) { return memory_of(coder, 3, num_bytes); }

void h5chunk_free_coder(Coder *coder) {
    for (int i = 0; i < 4; i++) free(coder->memory[i]);
    if (coder->inflater) libraries.close_inflater(coder->inflater);
    if (coder->zstd) libraries.close_zstd(coder->zstd);
}

/* Decode a stored block to exactly `num_bytes`. Each filter must give exactly the bytes that the one before it needs, if
 * their number is known. Returns 0, or -1 if the block is damaged or memory is short. */
int h5chunk_decode_block(Coder *coder, const Pipeline *pipeline, int64_t mask, const uint8_t *data, int64_t length,
                         uint8_t *out, int64_t num_bytes) {
    int64_t most = 2 * num_bytes + SLACK_BYTES, lengths[MAX_FILTERS + 1] = {num_bytes};
    const Filter *active[MAX_FILTERS];
    int count = 0;
    for (int64_t i = 0; i < pipeline->count; i++) { /* the length before each filter; 0 if it depends on the values */
        const Filter *filter = pipeline->filters + i;
        if (mask >> i & 1) continue;
        int keeps = filter->code == SHUFFLE || filter->code == FLETCHER32;
        lengths[count + 1] = keeps && lengths[count] ? lengths[count] + 4 * (filter->code == FLETCHER32) : 0;
        active[count++] = filter;
    }
    if (lengths[count] ? length != lengths[count] : length < 1 || length > most) return -1;
    int turn = 1;
    for (int i = count - 1; i >= 0; i--) {
        const Filter *filter = active[i];
        int64_t room = lengths[i] ? lengths[i] : most, done = -1;
        if (filter->code == FLETCHER32) {
            if (length < 4 || !is_intact(data, length)) return -1;
            length -= 4;
        } else if (filter->code == SHUFFLE && (filter->parameter == 1 || length < 2 * filter->parameter)) {
            if (length > room) return -1;
        } else {
            uint8_t *to = i ? memory_of(coder, turn, room) : out;
            if (!to) return -1;
            if (filter->code == GZIP) done = ungzip(coder, data, length, to, room);
            else if (filter->code == SHUFFLE) done = unshuffle(data, length, filter->parameter, to, room);
            else if (filter->code == LZF) done = h5chunk_unlzf(data, length, to, room);
            else if (filter->code == LZ4) done = unlz4(data, length, to, room);
            else if (filter->code == ZSTD) done = unzstd(coder, data, length, to, room);
            if (done < 0) return -1;
            data = to, length = done, turn = 3 - turn;
        }
        if (lengths[i] ? length != lengths[i] : length < 1) return -1;
    }
    if (data != out) memcpy(out, data, (size_t)num_bytes);
    return 0;
}
