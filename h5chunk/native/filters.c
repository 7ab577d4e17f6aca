/* Reverse three filters of HDF5: byte shuffle, Fletcher-32 and LZF. No function writes or reads beyond its buffers. */

#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define BLOCK 256 /* elements whose bytes are moved together, so that they stay in the cache */

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
