/* Decode JPEG images with a libjpeg-turbo that the process has loaded, whose functions are in `Jpeg`, and augment each
 * image while it is in the CPU's cache. */
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "augment.h"

#define EXPORT __attribute__((visibility("default")))

enum { GRAY = 1, RGB = 2, YCBCR = 3 };                                                   /* colour spaces */
enum { DONE = 0, LEFT_OVER = 1, FAILED = 2 };                                             /* results of `make` */
enum { ALL_DONE = -1, NO_MEMORY = -2 };                                                   /* of `h5chunk_decode` */
enum { ROWS = 16, SPARE = 96 };                                                           /* rows per call; bytes around pixels */
enum { EIGHTHS = 8, MOST_EIGHTHS = 4 }; /* scale at most to one half, because larger scales are slow */
enum { GAP = 2 };                       /* scale only if a box stays at least this many times as large as its result */
enum { MOST_PIXELS = 89478485 }; /* Pillow's limit */
enum { INFO_BYTES = 1024 };

/* The beginning of jpeg_error_mgr of libjpeg. */
typedef struct {
    void (*error_exit)(void *);
    void (*emit_message)(void *, int);
    void *output_message, *format_message, *reset_error_mgr;
    int code;
    int numbers[8];
    char rest[512];
} Errors;

/* The beginning of jpeg_decompress_struct, which is the same in versions 6 to 8 of the interface. */
typedef struct {
    Errors *errors;
    void *memory, *progress, *client_data;
    int is_decompressor, state;
    void *source;
    unsigned image_width, image_height;
    int num_components, color_space, out_color_space;
    unsigned scale_num, scale_denom;
    double gamma;
    int options[12];
    unsigned output_width, output_height;
    int out_color_components, output_components, rows_at_once, num_colors;
    void *colors;
    unsigned output_scanline;
    char rest[INFO_BYTES];
} Info;

/* The functions of libjpeg, and the version and structure size that it expects. */
typedef struct {
    Errors *(*std_error)(Errors *);
    void (*create)(Info *, int, size_t);
    void (*mem_src)(Info *, const uint8_t *, unsigned long);
    int (*read_header)(Info *, int);
    int (*start)(Info *);
    unsigned (*read_rows)(Info *, uint8_t **, unsigned);
    unsigned (*skip_rows)(Info *, unsigned);
    int (*finish)(Info *);
    void (*abort)(Info *);
    void (*destroy)(Info *);
    int64_t version, info_bytes;
} Jpeg;

/* The images of a batch. The bytes of image i are `data[starts[i]]` to `data[stops[i]]`. */
typedef struct {
    const uint8_t *data;
    const int64_t *starts, *stops;
    const uint8_t *orientations;
    int64_t *table, columns, count, next; /* `next` is the index of the next image that no thread has taken */
    int64_t channels;
} Images;

/* The state of a thread, which reuses it for all images. */
typedef struct {
    Info info; /* must be first, because libjpeg passes its address to `stop` */
    Errors errors;
    jmp_buf out;
    int64_t *image; /* row of the table, for the size at which the image is decoded */
    Room row, pixels, rooms[NUM_ROOMS];
} Reader;

static void stop(void *reader) { longjmp(((Reader *)reader)->out, 1); }

/* Stop at warnings, too, because the caller decodes questionable images in another way. */
static void stop_at_warning(void *reader, int level) {
    if (level < 0) stop(reader);
}

static int open_reader(const Jpeg *jpeg, Reader *reader) {
    reader->info.errors = jpeg->std_error(&reader->errors);
    reader->errors.error_exit = stop;
    reader->errors.emit_message = stop_at_warning;
    if (setjmp(reader->out)) return -1;
    jpeg->create(&reader->info, (int)jpeg->version, (size_t)jpeg->info_bytes);
    return 0;
}

/* Find the version and structure size that this libjpeg expects, which it reports when it refuses other values. Returns
 * 0, or -1 if they are not supported. */
EXPORT int h5chunk_find_jpeg(Jpeg *jpeg) {
    Reader reader;
    jpeg->version = jpeg->info_bytes = 0;
    if (!open_reader(jpeg, &reader)) return -1;
    jpeg->version = reader.errors.numbers[0];
    if (jpeg->version != 62 && jpeg->version != 70 && jpeg->version != 80) return -1;
    if (!open_reader(jpeg, &reader)) return -1;
    jpeg->info_bytes = reader.errors.numbers[0];
    if (jpeg->info_bytes < (int64_t)(sizeof(Info) - INFO_BYTES) || jpeg->info_bytes > (int64_t)sizeof(Info)) return -1;
    if (open_reader(jpeg, &reader)) return -1;
    jpeg->destroy(&reader.info);
    return 0;
}

/* Return the smallest scale of a side, in eighths, at which its box keeps enough pixels. */
static int64_t least_eighths(const int64_t *image, int side, int box, int full) {
    int64_t least = (GAP * image[side] * image[full] + image[box] - 1) / image[box], eighths = 1;
    if (least >= image[side]) return EIGHTHS;
    while (eighths < EIGHTHS && (image[side] * eighths + EIGHTHS - 1) / EIGHTHS < least) eighths++;
    return eighths;
}

/* Return `place * now / before`, rounded, half to even. */
static int64_t rescaled(int64_t place, int64_t now, int64_t before) {
    int64_t whole = place * now / before, rest = 2 * (place * now % before);
    return whole + (rest > before || (rest == before && whole % 2));
}

/* Change a row of a table for an image that is scaled while it is decoded. */
static void rescale(int64_t *image, int side, int first, int length, int64_t now) {
    int64_t start = rescaled(image[first], now, image[side]);
    int64_t end = rescaled(image[first] + image[length], now, image[side]);
    if (end < start + 1) end = start + 1;
    if (end > now) end = now;
    if (start > now - 1) start = now - 1;
    image[first] = start, image[length] = end - start, image[side] = now;
}

/* Begin to decode an image, and store its decoded size and geometry in `reader->image`. */
static void begin(const Jpeg *jpeg, Reader *reader, const Images *images, int64_t number) {
    Info *info = &reader->info;
    int64_t *image = reader->image, start = images->starts[number];
    jpeg->mem_src(info, images->data + start, (unsigned long)(images->stops[number] - start));
    jpeg->read_header(info, 1);
    if (info->image_height != image[HEIGHT] || info->image_width != image[WIDTH] || info->color_space < GRAY ||
        info->color_space > YCBCR)
        stop(reader);
    int64_t down = least_eighths(image, HEIGHT, BOX_HEIGHT, FULL_HEIGHT);
    int64_t across = least_eighths(image, WIDTH, BOX_WIDTH, FULL_WIDTH), eighths = down > across ? down : across;
    info->scale_denom = EIGHTHS, info->scale_num = eighths > MOST_EIGHTHS ? EIGHTHS : (unsigned)eighths;
    info->out_color_space = images->channels == 1 ? GRAY : RGB;
    jpeg->start(info);
    int64_t height = info->output_height, width = info->output_width;
    if (height > image[HEIGHT] || width > image[WIDTH] || info->out_color_components != images->channels) stop(reader);
    if (height != image[HEIGHT]) rescale(image, HEIGHT, TOP, BOX_HEIGHT, height);
    if (width != image[WIDTH]) rescale(image, WIDTH, LEFT, BOX_WIDTH, width);
}

/* Decode the rows of an image that its box needs, and write them to `pixels`. */
static int decode(const Jpeg *jpeg, Reader *reader, const Images *images, int64_t number, uint8_t *pixels) {
    if (setjmp(reader->out)) {
        jpeg->abort(&reader->info);
        return LEFT_OVER;
    }
    begin(jpeg, reader, images, number);
    Info *info = &reader->info;
    int64_t *image = reader->image, end = image[TOP] + image[BOX_HEIGHT];
    int64_t row_bytes = image[WIDTH] * images->channels;
    if (image[TOP]) jpeg->skip_rows(info, (unsigned)image[TOP]);
    while (info->output_scanline < end) {
        uint8_t *rows[ROWS];
        int64_t first = info->output_scanline, some = end - first < ROWS ? end - first : ROWS;
        for (int64_t i = 0; i < some; i++) rows[i] = pixels + (first + i) * row_bytes;
        jpeg->read_rows(info, rows, (unsigned)some);
    }
    if (info->output_scanline == info->output_height) jpeg->finish(info);
    else jpeg->abort(info);
    return DONE;
}

/* Shift a buffer off multiples of 32 bytes, at which libjpeg-turbo would use stores that bypass the caches. */
static uint8_t *keep_cached(uint8_t *buffer) { return buffer + (48 - (uintptr_t)buffer % 32) % 32; }

/* Process one image: without a rule, write its pixels to `out`, otherwise its augmented result. */
static int make(const Jpeg *jpeg, const Rule *rule, Reader *reader, const Images *images, int64_t number, uint8_t *out) {
    int64_t *row = images->table + number * images->columns, num_bytes = images->stops[number] - images->starts[number];
    size_t row_bytes = (size_t)images->columns * sizeof *row;
    const uint8_t *pixels = images->data + images->starts[number];
    if (!(reader->image = take(&reader->row, row_bytes))) return FAILED;
    memcpy(reader->image, row, row_bytes);
    reader->image[OFFSET] = rule ? 0 : row[OFFSET];
    if (jpeg) {
        if (images->orientations[number] != 1 || row[HEIGHT] * row[WIDTH] > MOST_PIXELS) return LEFT_OVER;
        num_bytes = row[HEIGHT] * row[WIDTH] * images->channels;
        uint8_t *to = rule ? take(&reader->pixels, (size_t)(num_bytes + SPARE)) : out + row[OFFSET];
        if (to && rule) to = keep_cached(to);
        if (!to || decode(jpeg, reader, images, number, to) != DONE) return to ? LEFT_OVER : FAILED;
        pixels = to;
    }
    if (rule) return augment_image(rule, pixels, num_bytes, reader->image, out, reader->rooms) ? FAILED : DONE;
    memcpy(row, reader->image, row_bytes);
    return DONE;
}

/* Decode images that no other thread has taken, or use their pixels if `jpeg` is NULL, and augment them, until none is
 * left. Returns ALL_DONE; or the index of an image that must be decoded in another way, after which the caller must
 * repeat the call; or NO_MEMORY.
 *
 * Image i becomes result i in `out`, of `result_bytes`. Without a `rule` it is only decoded, to its OFFSET in `out`. */
EXPORT int64_t h5chunk_decode(const Jpeg *jpeg, const Rule *rule, Images *images, uint8_t *out, int64_t result_bytes) {
    Reader *reader = calloc(1, sizeof *reader);
    int64_t number, found = ALL_DONE;
    if (!reader || (jpeg && open_reader(jpeg, reader))) {
        free(reader);
        return NO_MEMORY;
    }
    while (found == ALL_DONE && (number = __atomic_fetch_add(&images->next, 1, __ATOMIC_RELAXED)) < images->count) {
        int state = make(jpeg, rule, reader, images, number, rule ? out + number * result_bytes : out);
        if (state != DONE) found = state == LEFT_OVER ? number : NO_MEMORY;
    }
    if (jpeg) jpeg->destroy(&reader->info);
    free(reader->row.data);
    free(reader->pixels.data);
    for (int i = 0; i < NUM_ROOMS; i++) free(reader->rooms[i].data);
    free(reader);
    return found;
}
