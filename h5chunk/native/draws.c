/* Draw the geometry of augmented images, with the same results, bit for bit, as h5chunk/plan/draws.py and
 * h5chunk/transforms/augment.py: products and sums are rounded separately, in the same order (-ffp-contract=off). */
#include <math.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { BOX = 0, CROP = 1, RESIZE = 2, FLIP = 3, CUTOUT = 4, ERASE = 5 }; /* kinds of steps */
enum { OFFSET, HEIGHT, WIDTH, TOP, LEFT, BOX_HEIGHT, BOX_WIDTH, FULL_HEIGHT, FULL_WIDTH, DOWN, RIGHT, TURNED, ERASED };
enum { ATTEMPTS = 10, NUM_POWERS = 8 };
static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
static const double POWERS[NUM_POWERS] = {1.0, 0.6931471805599453, 0.2402265069591007, 0.055504108664821576,
                                          0.009618129107628477, 0.0013333558146428441, 0.00015403530393381606,
                                          1.5252733804059838e-05};

/* A step of a transform, whose random numbers are drawn with `key`.
 *
 * BOX     resize a random box to `height` x `width`; `scale` and `ratio` are the ranges of its area and aspect ratio.
 * CROP    crop the padded image to `height` x `width`, at a random position if `flag` is set, otherwise in the middle.
 *         If `reflects` is set, the padding mirrors the image, and must be smaller than the image.
 * RESIZE  resize the image to `height` x `width`; if `width` is 0, its shorter side to `height`.
 * FLIP    flip the image with probability `p`; if `flag` is set, invert this decision.
 * CUTOUT  erase a square of `height` around a random pixel.
 * ERASE   erase a random box of the result with probability `p`. */
typedef struct {
    int64_t kind;
    uint64_t key;
    int64_t height, width, left, top, right, bottom, flag, reflects;
    double scale[2], ratio[2], log_ratio[2], p; /* the logarithms have base 2 */
} Step;

/* The geometry of one image, as in the class Geometry of h5chunk/plan/draws.py. */
typedef struct {
    int64_t height, width, top, left, box_height, box_width, full_height, full_width, down, right, flip;
} Geometry;

static uint64_t mixed(uint64_t word, uint64_t key) {
    uint64_t bits = ((word + 1) * GOLDEN) ^ key;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}

/* Return number `index` of a sample's stream, in [0, 1). */
static double uniform(uint64_t own, uint64_t index) {
    return (double)(mixed(own + (index + 1) * GOLDEN, 0) >> 11) * 0x1p-53;
}

/* Round to the nearest integer, halves to even. |x| must be below 2**51. */
static double rounded(double x) {
    double sum = x + 0x1.8p52;
    return sum - 0x1.8p52;
}

static double power_of_two(double x) {
    double whole = rounded(x), part = x - whole, sum = POWERS[NUM_POWERS - 1];
    for (int i = NUM_POWERS - 2; i >= 0; i--) sum = sum * part + POWERS[i];
    return ldexp(sum, (int)whole);
}

static int64_t place(double number, int64_t room) {
    int64_t found = (int64_t)(number * (double)(room + 1));
    return found < room ? found : room;
}

/* Draw the size of a box that fits into an image. Returns whether one was found. */
static int draw_box(const Step *step, uint64_t own, int64_t height, int64_t width, int64_t *tall, int64_t *wide) {
    for (uint64_t i = 0; i < ATTEMPTS; i++) {
        double share = step->scale[0] + uniform(own, 2 * i) * (step->scale[1] - step->scale[0]);
        double area = share * (double)(height * width);
        double log_ratio = step->log_ratio[0] + uniform(own, 2 * i + 1) * (step->log_ratio[1] - step->log_ratio[0]);
        double ratio = power_of_two(log_ratio), high = rounded(sqrt(area / ratio)), broad = rounded(sqrt(area * ratio));
        if (high > 0 && broad > 0 && high <= (double)height && broad <= (double)width) {
            *tall = (int64_t)high, *wide = (int64_t)broad;
            return 1;
        }
    }
    return 0;
}

static int64_t clipped(double x, int64_t low, int64_t high) {
    return x < (double)low ? low : x > (double)high ? high : (int64_t)x;
}

static void crop(Geometry *to, int64_t top, int64_t left, int64_t height, int64_t width) {
    to->down += top;
    to->right += to->flip ? to->width - left - width : left;
    to->height = height, to->width = width;
}

static void resize(Geometry *to, int64_t height, int64_t width) {
    to->top += to->down, to->left += to->right;
    to->box_height = to->height, to->box_width = to->width;
    to->height = to->full_height = height, to->width = to->full_width = width;
    to->down = to->right = 0;
}

static void crop_and_resize(Geometry *to, const Step *step, uint64_t own) {
    int64_t tall, wide, top, left;
    if (draw_box(step, own, to->height, to->width, &tall, &wide)) {
        top = place(uniform(own, 2 * ATTEMPTS), to->height - tall);
        left = place(uniform(own, 2 * ATTEMPTS + 1), to->width - wide);
    } else { /* use the largest box in the middle */
        tall = clipped(rounded((double)to->width / step->ratio[0]), 1, to->height);
        wide = clipped(rounded((double)to->height * step->ratio[1]), 1, to->width);
        top = (to->height - tall) / 2, left = (to->width - wide) / 2;
    }
    crop(to, top, left, tall, wide);
    resize(to, step->height, step->width);
}

/* Crop an image, or return -1 if it is too small. */
static int cut(Geometry *to, const Step *step, uint64_t own) {
    int64_t down = to->height + step->top + step->bottom - step->height;
    int64_t along = to->width + step->left + step->right - step->width;
    if (down < 0 || along < 0) return -1;
    if (step->reflects && (step->top >= to->height || step->bottom >= to->height || step->left >= to->width ||
                           step->right >= to->width))
        return -1;
    int64_t top = step->flag ? place(uniform(own, 0), down) : (int64_t)rounded((double)down / 2);
    int64_t left = step->flag ? place(uniform(own, 1), along) : (int64_t)rounded((double)along / 2);
    crop(to, top - step->top, left - step->left, step->height, step->width);
    return 0;
}

static int resize_image(Geometry *to, const Step *step, int64_t longest) {
    int64_t height = step->height, width = step->width;
    if (!width) {
        int tall = to->height > to->width;
        int64_t longer = height * (tall ? to->height : to->width) / (tall ? to->width : to->height);
        if (longer > longest) return -1;
        width = tall ? height : longer;
        height = tall ? longer : height;
    }
    resize(to, height, width);
    return 0;
}

static int change(Geometry *to, const Step *step, uint64_t own, int64_t longest) {
    if (step->kind == BOX) crop_and_resize(to, step, own);
    else if (step->kind == CROP) return cut(to, step, own);
    else if (step->kind == RESIZE) return resize_image(to, step, longest);
    else to->flip ^= (uniform(own, 0) < step->p) ^ (step->flag != 0);
    return 0;
}

/* Write top, left, height and width of an erased box of a result to `box`. */
static void erase_box(int64_t *box, const Step *step, uint64_t own, const int64_t *sides) {
    int64_t size[2] = {0, 0};
    if (step->kind == ERASE) {
        if (!draw_box(step, own, sides[0], sides[1], size, size + 1) || uniform(own, 2 * ATTEMPTS + 2) >= step->p)
            size[0] = size[1] = 0;
        for (int i = 0; i < 2; i++) {
            box[i] = place(uniform(own, (uint64_t)(2 * ATTEMPTS + i)), sides[i] - size[i]);
            box[2 + i] = size[i];
        }
        return;
    }
    for (int i = 0; i < 2; i++) {
        int64_t first = place(uniform(own, (uint64_t)i), sides[i] - 1) - step->height / 2, end = first + step->height;
        box[i] = first < 0 ? 0 : first;
        box[2 + i] = (end < sides[i] ? end : sides[i]) - box[i];
    }
}

/* Write a row of `table` for each of `count` samples. `heights` and `widths` have the size of each image, or one size for
 * all images if `each` is 0; `sides` is the size of the results, and `longest` the maximum length of a side. Returns the
 * number of rows that were written, which is less than `count` if a step cannot be applied to an image. */
EXPORT int64_t h5chunk_draw(const Step *steps, int64_t num_steps, const int64_t *samples, int64_t count,
                            const int64_t *heights, const int64_t *widths, int64_t each, const int64_t *sides,
                            int64_t longest, int64_t *table) {
    for (int64_t i = 0; i < count; i++) {
        int64_t height = heights[i * each], width = widths[i * each], *erased = table + ERASED;
        if (height < 1 || width < 1) return i;
        Geometry to = {height, width, 0, 0, height, width, height, width, 0, 0, 0};
        for (int64_t k = 0; k < num_steps; k++) {
            const Step *step = steps + k;
            uint64_t own = mixed((uint64_t)samples[i], step->key);
            if (step->kind >= CUTOUT) erase_box(erased, step, own, sides), erased += 4;
            else if (change(&to, step, own, longest)) return i;
        }
        int64_t row[ERASED] = {0, height, width, to.top, to.left, to.box_height, to.box_width, to.full_height,
                               to.full_width, to.down, to.right, to.flip};
        for (int k = 0; k < ERASED; k++) table[k] = row[k];
        table = erased;
    }
    return count;
}
