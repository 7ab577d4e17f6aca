/* Change the colours of images in place: brightness, contrast, saturation and hue. h5chunk/transforms/colour.py
 * describes the arithmetic. */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default"))) /* selected at load time */
#else
#define CLONES
#endif

enum { BRIGHTNESS = 0, CONTRAST = 1, SATURATION = 2, HUE = 3, NUM_STEPS = 4 };
enum { COLUMNS = 5, BLOCK = 512 };

/* Some pixels of an image; gray ones are in `red`. */
typedef struct {
    int32_t red[BLOCK], green[BLOCK], blue[BLOCK];
} Pixels;

typedef struct {
    int64_t num_pixels, pixel_stride, channel_stride, channels;
} Layout;

INLINE int step_of(int32_t order, int number) { return order >> (3 * number) & 7; }

INLINE int32_t gray_value(int32_t red, int32_t green, int32_t blue) {
    return (int32_t)((uint32_t)(2989 * red + 5870 * green + 1140 * blue) / 10000);
}

INLINE int32_t whole(float value) {
    value = value < 0.0f ? 0.0f : value;
    return (int32_t)(value > 255.0f ? 255.0f : value);
}

INLINE void scale(int32_t *values, int64_t count, float factor, float added) {
    for (int64_t i = 0; i < count; i++) values[i] = whole((float)values[i] * factor + added);
}

INLINE void saturate(Pixels *pixels, int64_t count, float factor) {
    float rest = 1.0f - factor;
    for (int64_t i = 0; i < count; i++) {
        int32_t red = pixels->red[i], green = pixels->green[i], blue = pixels->blue[i];
        float added = (float)gray_value(red, green, blue) * rest;
        pixels->red[i] = whole((float)red * factor + added);
        pixels->green[i] = whole((float)green * factor + added);
        pixels->blue[i] = whole((float)blue * factor + added);
    }
}

/* Return a channel's value, given the hue plus the channel's offset, in `sector` = 65536 * delta per sixth of a turn. */
INLINE int32_t value_at(int32_t hue, int32_t sector, int32_t high) {
    hue -= hue >= 6 * sector ? 6 * sector : 0;
    int32_t below = hue < 4 * sector - hue ? hue : 4 * sector - hue;
    below = below < 0 ? 0 : below;
    int32_t value = high * 65536 - (below > sector ? sector : below);
    return (value + (value >> 8)) >> 16;
}

INLINE void turn_hue(Pixels *pixels, int64_t count, int32_t shift) {
    for (int64_t i = 0; i < count; i++) {
        int32_t red = pixels->red[i], green = pixels->green[i], blue = pixels->blue[i];
        int32_t high = red > green ? red : green, low = red < green ? red : green;
        high = high > blue ? high : blue, low = low < blue ? low : blue;
        int32_t delta = high - low, sector = delta * 65536;
        int32_t hue = high == green ? 2 * delta + blue - red : 4 * delta + red - green;
        hue = (high == red ? green - blue : hue) * 65536 + shift * delta;
        hue += hue < 0 ? 6 * sector : 0;
        hue -= hue >= 6 * sector ? 6 * sector : 0;
        pixels->red[i] = value_at(hue + 5 * sector, sector, high);
        pixels->green[i] = value_at(hue + 3 * sector, sector, high);
        pixels->blue[i] = value_at(hue + sector, sector, high);
    }
}

/* Apply a step to pixels. `own` is the row of the image in the table, and `mean` its mean gray value. */
INLINE void change(Pixels *pixels, int64_t count, int step, const int32_t *own, float mean, int64_t channels) {
    float factor = 1.0f;
    if (step < HUE) memcpy(&factor, &own[1 + step], sizeof factor);
    if (step == BRIGHTNESS || step == CONTRAST) {
        float added = step == CONTRAST ? mean * (1.0f - factor) : 0.0f;
        scale(pixels->red, count, factor, added);
        if (channels == 3) scale(pixels->green, count, factor, added);
        if (channels == 3) scale(pixels->blue, count, factor, added);
    }
    if (step == SATURATION && channels == 3) saturate(pixels, count, factor);
    if (step == HUE && channels == 3) turn_hue(pixels, count, own[1 + HUE]);
}

INLINE void load(int32_t *values, const uint8_t *image, int64_t count, int64_t stride) {
    if (stride == 1)
        for (int64_t i = 0; i < count; i++) values[i] = image[i];
    else
        for (int64_t i = 0; i < count; i++) values[i] = image[i * stride];
}

INLINE void store(const int32_t *values, uint8_t *image, int64_t count, int64_t stride) {
    if (stride == 1)
        for (int64_t i = 0; i < count; i++) image[i] = (uint8_t)values[i];
    else
        for (int64_t i = 0; i < count; i++) image[i * stride] = (uint8_t)values[i];
}

INLINE int64_t load_pixels(Pixels *pixels, const uint8_t *image, const Layout *layout, int64_t first) {
    int64_t count = layout->num_pixels - first < BLOCK ? layout->num_pixels - first : BLOCK;
    const uint8_t *place = image + first * layout->pixel_stride;
    load(pixels->red, place, count, layout->pixel_stride);
    if (layout->channels == 3) {
        load(pixels->green, place + layout->channel_stride, count, layout->pixel_stride);
        load(pixels->blue, place + 2 * layout->channel_stride, count, layout->pixel_stride);
    }
    return count;
}

/* Return the mean gray value of an image after the steps that precede contrast. */
INLINE float mean_gray(const uint8_t *image, const int32_t *own, const Layout *layout) {
    Pixels pixels;
    int64_t sum = 0;
    for (int64_t first = 0; first < layout->num_pixels; first += BLOCK) {
        int64_t count = load_pixels(&pixels, image, layout, first);
        int32_t part = 0;
        for (int number = 0; step_of(own[0], number) != CONTRAST; number++)
            change(&pixels, count, step_of(own[0], number), own, 0.0f, layout->channels);
        if (layout->channels == 3)
            for (int64_t i = 0; i < count; i++) part += gray_value(pixels.red[i], pixels.green[i], pixels.blue[i]);
        else
            for (int64_t i = 0; i < count; i++) part += pixels.red[i];
        sum += part;
    }
    return (float)(256 * sum / layout->num_pixels) / 256.0f;
}

CLONES static void jitter(uint8_t *image, const int32_t *own, const Layout *layout) {
    Pixels pixels;
    float mean = 0.0f;
    for (int number = 0; number < NUM_STEPS; number++)
        if (step_of(own[0], number) == CONTRAST) mean = mean_gray(image, own, layout);
    for (int64_t first = 0; first < layout->num_pixels; first += BLOCK) {
        int64_t count = load_pixels(&pixels, image, layout, first);
        for (int number = 0; number < NUM_STEPS; number++)
            change(&pixels, count, step_of(own[0], number), own, mean, layout->channels);
        uint8_t *place = image + first * layout->pixel_stride;
        store(pixels.red, place, count, layout->pixel_stride);
        if (layout->channels == 3) {
            store(pixels.green, place + layout->channel_stride, count, layout->pixel_stride);
            store(pixels.blue, place + 2 * layout->channel_stride, count, layout->pixel_stride);
        }
    }
}

/* Change `count` images in place. Each has a row of `COLUMNS` numbers in `table`, and `channels` planes of pixels, or
 * as many interleaved values per pixel. */
EXPORT void h5chunk_jitter(uint8_t *images, const int32_t *table, int64_t count, int64_t num_pixels, int64_t channels,
                           int interleaved) {
    Layout layout = {num_pixels, interleaved ? channels : 1, interleaved ? 1 : num_pixels, channels};
    for (int64_t i = 0; i < count; i++) jitter(images + i * num_pixels * channels, table + i * COLUMNS, &layout);
}
