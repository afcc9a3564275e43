/* Everything that libjpeg-turbo does for us: JPEGs without our index, and the lossless transcoding that makes the index. */
#include "native.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <jpeglib.h>
#include <jerror.h>

/* A progressive file of 600 KB may ask for 190 passes over 2^28 pixels, 4 s of work. Encoders make about 10. */
#define MOST_SCANS 200
#define MOST_VISITS (16 * (uint64_t)MOST_PIXELS) /* scans times pixels */

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf back;
    char text[JMSG_LENGTH_MAX];
    int status;
} Errors;

static void on_error(j_common_ptr common)
{
    Errors *errors = (Errors *)common->err;
    errors->base.format_message(common, errors->text);
    errors->status = errors->base.msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : DAMAGED;
    longjmp(errors->back, 1);
}

/* A warning is libjpeg's guess at pixels that the file does not hold, so it is an error here. Bytes before a marker that belong
 * to nothing are the exception: no pixel depends on them. */
static void on_message(j_common_ptr common, int level)
{
    if (level < 0 && common->err->msg_code != JWRN_EXTRANEOUS_DATA) on_error(common);
}

static void on_progress(j_common_ptr common)
{
    j_decompress_ptr jpeg = (j_decompress_ptr)common;
    uint64_t visits = (uint64_t)jpeg->image_height * jpeg->image_width * jpeg->input_scan_number;
    if (jpeg->input_scan_number > MOST_SCANS || visits > MOST_VISITS) {
        Errors *errors = (Errors *)common->err;
        errors->status = UNSUPPORTED;
        snprintf(errors->text, sizeof errors->text, "it has more scans than an image of its size needs");
        longjmp(errors->back, 1);
    }
}

static void watch(Errors *errors)
{
    jpeg_std_error(&errors->base);
    errors->base.error_exit = on_error;
    errors->base.emit_message = on_message;
    errors->base.output_message = NULL;
    errors->text[0] = 0;
}

#if JPEG_LIB_VERSION >= 70
#define DCT_SIZE(component) ((component)->DCT_h_scaled_size)
#define SMALLEST_DCT(jpeg) ((jpeg)->min_DCT_h_scaled_size)
#else
#define DCT_SIZE(component) ((component)->DCT_scaled_size)
#define SMALLEST_DCT(jpeg) ((jpeg)->min_DCT_scaled_size)
#endif

/* Planes of `box` (pixels at 1/scale) of an ordinary JPEG. Rows above the box are entropy-decoded but not transformed, rows
 * below it are not read. `bytes` may be followed by anything. */
int turbo_decode(Sample *sample, Scratch *scratch, const uint8_t *bytes, size_t length, Box box, int scale, Picture *picture)
{
    struct jpeg_decompress_struct jpeg;
    struct jpeg_progress_mgr progress = {.progress_monitor = on_progress};
    Errors errors;
    jpeg.err = &errors.base;
    watch(&errors);
    if (setjmp(errors.back)) {
        jpeg_destroy_decompress(&jpeg);
        return fail(sample->message, errors.status, "%s", errors.text);
    }
    jpeg_create_decompress(&jpeg);
    jpeg.progress = &progress;
    jpeg_mem_src(&jpeg, bytes, length);
    jpeg_read_header(&jpeg, TRUE);
    int status = OK;
    if ((int)jpeg.image_height != sample->height || (int)jpeg.image_width != sample->width) {
        status = fail(sample->message, DAMAGED, "it is %u x %u pixels, not %d x %d as the dataset says", jpeg.image_width,
            jpeg.image_height, sample->width, sample->height);
    } else if ((uint64_t)jpeg.image_height * jpeg.image_width > MOST_PIXELS) {
        status = fail(sample->message, UNSUPPORTED, "it has more than %d pixels", MOST_PIXELS);
    } else if (jpeg.jpeg_color_space != JCS_YCbCr && jpeg.jpeg_color_space != JCS_RGB && jpeg.jpeg_color_space != JCS_GRAYSCALE) {
        status = fail(sample->message, UNSUPPORTED, "its colors are neither gray nor RGB");
    }
    if (status) {
        jpeg_destroy_decompress(&jpeg);
        return status;
    }
    jpeg.raw_data_out = TRUE;
    jpeg.out_color_space = jpeg.jpeg_color_space;
    jpeg.dct_method = JDCT_ISLOW;
    jpeg.scale_num = 1, jpeg.scale_denom = scale;
    jpeg_start_decompress(&jpeg);

    int smallest = SMALLEST_DCT(&jpeg), tall = jpeg.max_v_samp_factor * smallest;
    *picture = (Picture){
        .planes = jpeg.num_components, .ycc = jpeg.jpeg_color_space == JCS_YCbCr, .scale = scale,
        .height = jpeg.output_height, .width = jpeg.output_width,
    };
    /* Two pixels of margin for interpolated chroma, and whole rows of MCUs. */
    int top = (box.top > 2 ? box.top - 2 : 0) / tall, bottom = (box.bottom + 1) / tall + 1;
    int mcu_rows = ((int)jpeg.output_height + tall - 1) / tall;
    if (bottom > mcu_rows) bottom = mcu_rows;
    size_t room = 0, rows_room = 0;
    for (int n = 0; n < jpeg.num_components; n++) {
        jpeg_component_info *c = &jpeg.comp_info[n];
        Plane *plane = &picture->plane[n];
        int across = c->h_samp_factor * DCT_SIZE(c), down = c->v_samp_factor * DCT_SIZE(c);
        int ratio_x = jpeg.max_h_samp_factor * smallest / across, ratio_y = tall / down;
        if (ratio_x * across != jpeg.max_h_samp_factor * smallest || ratio_y * down != tall || ratio_x > 4 || ratio_y > 4) {
            jpeg_destroy_decompress(&jpeg);
            return fail(sample->message, UNSUPPORTED, "its color planes have sizes that this program does not interpolate");
        }
        plane->ratio_x = ratio_x, plane->ratio_y = ratio_y;
        plane->extent_x = ((int)jpeg.output_width + ratio_x - 1) / ratio_x;
        plane->extent_y = ((int)jpeg.output_height + ratio_y - 1) / ratio_y;
        plane->top = top * down, plane->height = (bottom - top) * down;
        plane->left = (box.left > 2 ? box.left - 2 : 0) / ratio_x;
        int right = (box.right + 1) / ratio_x + 1;
        plane->width = (right < plane->extent_x ? right : plane->extent_x) - plane->left;
        plane->step = plane->height;
        room += (size_t)plane->step * plane->width + PADDING;
        rows_room += (size_t)c->width_in_blocks * DCT_SIZE(c) * down + PADDING;
    }
    if (!grow((void **)&scratch->planes, &scratch->planes_room, room + rows_room)) {
        jpeg_destroy_decompress(&jpeg);
        return NO_MEMORY;
    }
    uint8_t *memory = scratch->planes;
    JSAMPROW row[3][4 * DCTSIZE];
    JSAMPARRAY rows[3] = {row[0], row[1], row[2]};
    for (int n = 0; n < jpeg.num_components; n++) {
        picture->plane[n].data = memory;
        memory += (size_t)picture->plane[n].step * picture->plane[n].width + PADDING;
    }
    for (int n = 0; n < jpeg.num_components; n++) {
        jpeg_component_info *c = &jpeg.comp_info[n];
        int down = c->v_samp_factor * DCT_SIZE(c), wide = c->width_in_blocks * DCT_SIZE(c);
        for (int y = 0; y < down; y++) row[n][y] = memory + (size_t)y * wide;
        memory += (size_t)down * wide + PADDING;
    }
    for (int mcu_row = 0; mcu_row < bottom; mcu_row++) {
        int wanted = mcu_row >= top;
        for (int n = 0; n < jpeg.num_components; n++) jpeg.comp_info[n].component_needed = wanted;
        if (jpeg_read_raw_data(&jpeg, rows, tall) == 0) break;
        for (int n = 0; n < jpeg.num_components && wanted; n++) {
            jpeg_component_info *c = &jpeg.comp_info[n];
            Plane *plane = &picture->plane[n];
            int down = c->v_samp_factor * DCT_SIZE(c);
            transpose_bytes(row[n][0] + plane->left, c->width_in_blocks * DCT_SIZE(c), plane->data + (mcu_row - top) * down,
                plane->step, down, plane->width);
        }
    }
    /* What lies below the crop is not decoded, but a file that stops there was cut; as Pillow, ask for the end marker. */
    const uint8_t *end = bytes + length, *rest = end - jpeg.src->bytes_in_buffer;
    int ended = jpeg_has_multiple_scans(&jpeg); /* all scans were read before the first row */
    while (!ended && rest < end && (rest = memchr(rest, 0xFF, end - rest))) ended = ++rest < end && *rest == 0xD9;
    ended |= jpeg.unread_marker == JPEG_EOI;
    jpeg_destroy_decompress(&jpeg);
    return ended ? OK : fail(sample->message, DAMAGED, "it ends before its last row");
}

/* Size and kind of an encoded image: OK if turbo_decode reads it. */
API int densefeed_probe(const uint8_t *bytes, size_t length, int *height, int *width, char *message)
{
    struct jpeg_decompress_struct jpeg;
    Errors errors;
    *height = *width = 0;
    if (length < 3 || memcmp(bytes, "\xFF\xD8\xFF", 3)) return fail(message, UNSUPPORTED, "it is no JPEG");
    jpeg.err = &errors.base;
    watch(&errors);
    if (setjmp(errors.back)) {
        jpeg_destroy_decompress(&jpeg);
        return fail(message, errors.status, "%s", errors.text);
    }
    jpeg_create_decompress(&jpeg);
    jpeg_mem_src(&jpeg, bytes, length);
    jpeg_read_header(&jpeg, TRUE);
    *height = jpeg.image_height, *width = jpeg.image_width;
    J_COLOR_SPACE color = jpeg.jpeg_color_space;
    jpeg_destroy_decompress(&jpeg);
    if (color != JCS_YCbCr && color != JCS_RGB && color != JCS_GRAYSCALE)
        return fail(message, UNSUPPORTED, "its colors are neither gray nor RGB");
    return OK;
}

/* The same DCT coefficients as one baseline scan with optimized Huffman tables and a restart marker every `interval` MCUs (0:
 * none); of the APP segments JFIF's and Adobe's stay. `*out` is freed with densefeed_free. */
API int densefeed_transcode(const uint8_t *bytes, size_t length, int interval, uint8_t **out, size_t *out_length, char *message)
{
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    struct jpeg_progress_mgr progress = {.progress_monitor = on_progress};
    Errors errors;
    /* libjpeg frees its own first buffer when it needs a larger one, and says where that is only at the end: after an error
     * between, a buffer of its making would be freed twice. So the first one is ours; half more than the input is rarely short. */
    unsigned long size = length + length / 2 + 65536;
    unsigned char *const room = malloc(size), *written = room;
    *out = NULL, *out_length = 0;
    if (!room) return fail(message, NO_MEMORY, "memory is used up");
    memset(&to, 0, sizeof to), memset(&from, 0, sizeof from);
    from.err = to.err = &errors.base;
    watch(&errors);
    if (setjmp(errors.back)) {
        jpeg_destroy_compress(&to);
        jpeg_destroy_decompress(&from);
        free(room);
        return fail(message, errors.status, "%s", errors.text);
    }
    jpeg_create_decompress(&from);
    from.progress = &progress;
    jpeg_mem_src(&from, bytes, length);
    jpeg_read_header(&from, TRUE);
    int status = OK;
    if (from.jpeg_color_space != JCS_YCbCr && from.jpeg_color_space != JCS_RGB && from.jpeg_color_space != JCS_GRAYSCALE)
        status = fail(message, UNSUPPORTED, "its colors are neither gray nor RGB");
    else if ((uint64_t)from.image_height * from.image_width > MOST_PIXELS)
        status = fail(message, UNSUPPORTED, "it has more than %d pixels", MOST_PIXELS);
    if (status) {
        jpeg_destroy_decompress(&from);
        free(room);
        return status;
    }
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(&from);
    jpeg_create_compress(&to);
    jpeg_mem_dest(&to, &written, &size);
    jpeg_copy_critical_parameters(&from, &to);
    to.optimize_coding = TRUE;
    to.restart_interval = interval;
    jpeg_write_coefficients(&to, coefficients);
    jpeg_finish_compress(&to);
    jpeg_destroy_compress(&to);
    jpeg_destroy_decompress(&from); /* the coefficients were read up to the file's end */
    if (written != room) free(room);
    *out = written, *out_length = size;
    return OK;
}

API void densefeed_free(void *memory) { free(memory); }
