/* Everything done with libjpeg-turbo: decoding of JPEGs without our index, and the lossless
 * transcoding that prepares a JPEG for the index. */
#include "native.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <jpeglib.h>
#include <jerror.h>

/* A progressive file of 600 KB can hold 190 scans of 2^28 pixels: 4 s. Encoders write about 10. */
#define MOST_SCANS 200
#define MOST_VISITS (16 * (uint64_t)most_pixels) /* scans times pixels */
/* Bytes of all DCT coefficients, which libjpeg keeps for several scans and for transcoding: 3 for
 * each pixel in 4:2:0, 6 in 4:4:4, 8 in CMYK. At the default limit this is 512 MiB. */
#define MOST_COEFFICIENTS (6 * most_pixels)
#define OTHER_BYTES (1 << 26) /* of libjpeg's own buffers: rows of pixels, 8 MB at 65,500 pixels */
#define MEMORY_MESSAGE "its coefficients take more memory than --max-pixels %lld allows"

typedef struct {
    struct jpeg_error_mgr base;
    struct jpeg_progress_mgr progress;
    jmp_buf back;
    char text[JMSG_LENGTH_MAX];
    int status;
} Errors;

/* Return to the setjmp of the current call, with a status and a message. */
__attribute__((noreturn, format(printf, 3, 4)))
static void stop(Errors *errors, int status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(errors->text, sizeof errors->text, format, list);
    va_end(list);
    errors->status = status;
    longjmp(errors->back, 1);
}

static void on_error(j_common_ptr common) {
    Errors *errors = (Errors *)common->err;
    /* libjpeg-turbo has no files to move coefficients to, so it stops at max_memory_to_use. */
    if (errors->base.msg_code == JERR_NO_BACKING_STORE)
        stop(errors, DAMAGED, MEMORY_MESSAGE, (long long)most_pixels);
    errors->base.format_message(common, errors->text);
    errors->status = errors->base.msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : DAMAGED;
    longjmp(errors->back, 1);
}

/* Treat warnings as errors: after a warning libjpeg invents pixels that the file does not contain.
 * Extraneous bytes before a marker are the exception: some encoders write them, and no pixel depends
 * on them. They are counted, because a decoder that lost its place leaves them too. */
static void on_message(j_common_ptr common, int level) {
    if (level >= 0) return;
    if (common->err->msg_code != JWRN_EXTRANEOUS_DATA) on_error(common);
    if (!common->err->num_warnings++)
        common->err->format_message(common, ((Errors *)common->err)->text);
}

static void on_progress(j_common_ptr common) {
    j_decompress_ptr jpeg = (j_decompress_ptr)common;
    uint64_t visits = (uint64_t)jpeg->image_height * jpeg->image_width * jpeg->input_scan_number;
    if (jpeg->input_scan_number > MOST_SCANS || visits > MOST_VISITS)
        stop((Errors *)common->err, UNSUPPORTED, "it has more scans than its size needs");
}

/* Return whether the frame of `size` bytes needs too much memory for its coefficients. */
static int has_too_many_coefficients(const uint8_t *frame, int size) {
    int64_t widest = 1, tallest = 1, blocks = 0, pixels = (int64_t)be16(frame + 3) * be16(frame + 5);
    for (int n = 0; n < frame[7] && 8 + 3 * n + 3 <= size; n++) {
        int h = frame[9 + 3 * n] >> 4, v = frame[9 + 3 * n] & 15;
        widest = max((int)widest, h), tallest = max((int)tallest, v), blocks += h * v;
    }
    return 2 * pixels * blocks / (widest * tallest) > MOST_COEFFICIENTS;
}

/* Check the frame header of a JPEG before a decoder sees it. Versions of libjpeg differ in the
 * codings that they read, and none limits the size. `whole`: all coefficients will be in memory. */
static int check_frame(const uint8_t *bytes, size_t length, int whole, char *message) {
    const uint8_t *at = bytes + 2, *end = bytes + length, *frame = NULL;
    int frame_size = 0;
    while (end - at >= 4 && (at = memchr(at, 0xFF, end - at - 3))) {
        int marker = at[1], size = be16(at + 2);
        if (marker == 0xFF) {
            at++; /* fill bytes */
            continue;
        }
        if (marker <= 0x01 || (marker >= 0xD0 && marker <= 0xD8)) {
            at += 2; /* no marker, or one without a body */
            continue;
        }
        if (marker == 0xD9 || size > end - at - 2) break;
        if (marker == 0xDA && frame && size > 2) {
            whole |= at[4] < frame[7];
            break;
        }
        if ((marker & 0xF0) == 0xC0 && marker != 0xC4 && marker != 0xC8 && marker != 0xCC) {
            if (frame || size < 8) break;
            frame = at + 2, frame_size = size;
            if (marker != 0xC0 && marker != 0xC1 && marker != 0xC2 && marker != 0xC9
                && marker != 0xCA)
                return fail(message, DAMAGED,
                    "it is a lossless or hierarchical JPEG; save it as a baseline JPEG");
            if (frame[2] != 8)
                return fail(message, DAMAGED, "it has %d bits per color; convert it to 8 bits",
                    frame[2]);
            TRY(check_size(be16(frame + 3), be16(frame + 5), message));
            whole |= marker == 0xC2 || marker == 0xCA;
        }
        at += 2 + size;
    }
    if (frame && whole && has_too_many_coefficients(frame, frame_size))
        return fail(message, DAMAGED, MEMORY_MESSAGE, (long long)most_pixels);
    return OK;
}

/* Check that decoders agree on a JPEG: lossy, 8 bits per color, not too large. Returns OK if there
 * is no frame header, which every decoder refuses. */
API int densefeed_check_frame(const uint8_t *bytes, size_t length, char *message) {
    return length < 2 ? OK : check_frame(bytes, length, 0, message);
}

/* As check_frame; an error returns to the setjmp of `errors`. */
static void require_frame(Errors *errors, const uint8_t *bytes, size_t length, int whole) {
    errors->status = check_frame(bytes, length, whole, errors->text);
    if (errors->status) longjmp(errors->back, 1);
}

/* Open a JPEG and read its header. Errors, now and later, return to the setjmp of `errors`. */
static void open_jpeg(j_decompress_ptr jpeg, Errors *errors, const uint8_t *bytes, size_t length) {
    jpeg->err = jpeg_std_error(&errors->base);
    errors->base.error_exit = on_error;
    errors->base.emit_message = on_message;
    errors->base.output_message = NULL;
    errors->progress = (struct jpeg_progress_mgr){.progress_monitor = on_progress};
    jpeg_create_decompress(jpeg);
    require_frame(errors, bytes, length, 0);
    jpeg->mem->max_memory_to_use = (long)MOST_COEFFICIENTS + OTHER_BYTES;
    jpeg->progress = &errors->progress;
    jpeg_mem_src(jpeg, bytes, length);
    jpeg_read_header(jpeg, TRUE);
}

#if JPEG_LIB_VERSION >= 70
#define DCT_SIZE(component) ((component)->DCT_h_scaled_size)
#else
#define DCT_SIZE(component) ((component)->DCT_scaled_size)
#endif

static void check_color(j_decompress_ptr jpeg) {
    J_COLOR_SPACE color = jpeg->jpeg_color_space;
    if (color != JCS_YCbCr && color != JCS_RGB && color != JCS_GRAYSCALE)
        stop((Errors *)jpeg->err, UNSUPPORTED, "it is neither grayscale nor RGB");
}

/* Decode the planes of `box` (pixels at 1/scale) of a JPEG without an index. Rows above the box are
 * entropy-decoded but not transformed, rows below it are not read. Any bytes may follow `bytes`. */
int turbo_decode(Sample *sample, Scratch *scratch, const uint8_t *bytes, size_t length, Box box,
    int scale, Picture *picture) {
    struct jpeg_decompress_struct jpeg;
    Errors errors;
    if (setjmp(errors.back)) {
        jpeg_destroy_decompress(&jpeg);
        return fail(sample->message, errors.status, "%s", errors.text);
    }
    open_jpeg(&jpeg, &errors, bytes, length);
    if ((int)jpeg.image_height != sample->height || (int)jpeg.image_width != sample->width)
        stop(&errors, DAMAGED, "it is %u x %u pixels, not %d x %d as recorded in the dataset",
            jpeg.image_width, jpeg.image_height, sample->width, sample->height);
    check_color(&jpeg);
    jpeg.raw_data_out = TRUE;
    jpeg.out_color_space = jpeg.jpeg_color_space;
    jpeg.dct_method = JDCT_ISLOW;
    /* Of a progressive file whose scans leave out coefficients libjpeg guesses them, in each version
     * differently, and the same coefficients with an index would give other pixels. */
    jpeg.do_block_smoothing = FALSE;
    jpeg.scale_num = 1, jpeg.scale_denom = scale;
    jpeg_start_decompress(&jpeg);

    int wide = jpeg.max_h_samp_factor * DCTSIZE / scale;
    int tall = jpeg.max_v_samp_factor * DCTSIZE / scale;
    *picture = (Picture){
        .planes = jpeg.num_components, .ycc = jpeg.jpeg_color_space == JCS_YCbCr, .scale = scale,
        .height = jpeg.output_height, .width = jpeg.output_width,
    };
    /* Whole rows of MCUs, with a margin of two pixels for interpolated chroma. */
    int top = max(box.top - 2, 0) / tall, mcu_rows = ((int)jpeg.output_height + tall - 1) / tall;
    int bottom = min((box.bottom + 1) / tall + 1, mcu_rows);
    int heights[3], row_bytes[3]; /* of a component's part in a row of MCUs */
    size_t room = 0;
    for (int n = 0; n < jpeg.num_components; n++) {
        jpeg_component_info *c = &jpeg.comp_info[n];
        Plane *plane = &picture->plane[n];
        int across = c->h_samp_factor * DCT_SIZE(c), down = c->v_samp_factor * DCT_SIZE(c);
        int ratio_x = wide / across, ratio_y = tall / down;
        if (ratio_x * across != wide || ratio_y * down != tall || ratio_x > 4 || ratio_y > 4)
            stop(&errors, UNSUPPORTED, "its chroma subsampling is not supported");
        plane->ratio_x = ratio_x, plane->ratio_y = ratio_y;
        plane->extent_x = ((int)jpeg.output_width + ratio_x - 1) / ratio_x;
        plane->extent_y = ((int)jpeg.output_height + ratio_y - 1) / ratio_y;
        plane->top = top * down, plane->height = (bottom - top) * down;
        plane->left = max(box.left - 2, 0) / ratio_x;
        plane->width = min((box.right + 1) / ratio_x + 1, plane->extent_x) - plane->left;
        plane->step = plane->height;
        heights[n] = down, row_bytes[n] = c->width_in_blocks * DCT_SIZE(c);
        room += (size_t)plane->step * plane->width + (size_t)row_bytes[n] * down + 2 * PADDING;
    }
    if (!GROW(scratch, planes, room)) stop(&errors, NO_MEMORY, "out of memory");
    uint8_t *memory = scratch->planes;
    JSAMPROW row[3][4 * DCTSIZE];
    JSAMPARRAY rows[3] = {row[0], row[1], row[2]};
    for (int n = 0; n < jpeg.num_components; n++) {
        picture->plane[n].data = memory;
        memory += (size_t)picture->plane[n].step * picture->plane[n].width + PADDING;
        for (int y = 0; y < heights[n]; y++) row[n][y] = memory + (size_t)y * row_bytes[n];
        memory += (size_t)heights[n] * row_bytes[n] + PADDING;
    }
    for (int mcu_row = 0; mcu_row < bottom; mcu_row++) {
        int wanted = mcu_row >= top;
        for (int n = 0; n < jpeg.num_components; n++) jpeg.comp_info[n].component_needed = wanted;
        if (jpeg_read_raw_data(&jpeg, rows, tall) == 0) break;
        for (int n = 0; n < jpeg.num_components && wanted; n++) {
            Plane *plane = &picture->plane[n];
            uint8_t *to = plane->data + (mcu_row - top) * heights[n];
            transpose_bytes(row[n][0] + plane->left, row_bytes[n], to, plane->step, heights[n],
                plane->width);
        }
    }
    /* Rows below the crop are not decoded, but a file that ends there was truncated. Like Pillow,
     * require the end marker. If there are several scans, all were read before the first row. */
    const uint8_t *end = bytes + length, *rest = end - jpeg.src->bytes_in_buffer;
    int ended = jpeg_has_multiple_scans(&jpeg);
    while (!ended && rest < end && (rest = memchr(rest, 0xFF, end - rest)))
        ended = ++rest < end && *rest == 0xD9;
    ended |= jpeg.unread_marker == JPEG_EOI;
    jpeg_destroy_decompress(&jpeg);
    return ended ? OK : fail(sample->message, DAMAGED, "it ends before its last row");
}

/* Read the size of an encoded image. Returns OK if turbo_decode supports its format. */
API int densefeed_probe(
    const uint8_t *bytes, size_t length, int *height, int *width, char *message) {
    struct jpeg_decompress_struct jpeg;
    Errors errors;
    if (length < 3 || memcmp(bytes, "\xFF\xD8\xFF", 3))
        return fail(message, UNSUPPORTED, "it is not a JPEG");
    if (setjmp(errors.back)) {
        jpeg_destroy_decompress(&jpeg);
        return fail(message, errors.status, "%s", errors.text);
    }
    open_jpeg(&jpeg, &errors, bytes, length);
    *height = jpeg.image_height, *width = jpeg.image_width;
    check_color(&jpeg);
    jpeg_destroy_decompress(&jpeg);
    return OK;
}

/* Read the components of a JPEG: `*count` of them, at most 4, each with two sampling factors. */
API int densefeed_sampling(
    const uint8_t *bytes, size_t length, int *count, int factors[8], char *message) {
    struct jpeg_decompress_struct jpeg;
    Errors errors;
    if (setjmp(errors.back)) {
        jpeg_destroy_decompress(&jpeg);
        return fail(message, errors.status, "%s", errors.text);
    }
    open_jpeg(&jpeg, &errors, bytes, length);
    *count = min(jpeg.num_components, 4);
    for (int n = 0; n < *count; n++) {
        factors[2 * n] = jpeg.comp_info[n].h_samp_factor;
        factors[2 * n + 1] = jpeg.comp_info[n].v_samp_factor;
    }
    jpeg_destroy_decompress(&jpeg);
    return OK;
}

/* Entropy-decode a whole JPEG of any color. `*warnings` gets the number of libjpeg's warnings that
 * the decoders ignore, and `message` the first of them. */
API int densefeed_scan(const uint8_t *bytes, size_t length, int *warnings, char *message) {
    struct jpeg_decompress_struct jpeg;
    Errors errors;
    if (setjmp(errors.back)) {
        jpeg_destroy_decompress(&jpeg);
        return fail(message, errors.status, "%s", errors.text);
    }
    open_jpeg(&jpeg, &errors, bytes, length);
    require_frame(&errors, bytes, length, 1);
    jpeg_read_coefficients(&jpeg);
    *warnings = (int)errors.base.num_warnings;
    if (*warnings) fail(message, OK, "%s", errors.text);
    jpeg_destroy_decompress(&jpeg);
    return OK;
}

/* Write the same DCT coefficients as one baseline scan with optimized Huffman tables and a restart
 * marker every `interval` MCUs (0: none). Of the APP segments only JFIF and Adobe are kept. The
 * caller frees `*out` with densefeed_free. */
API int densefeed_transcode(const uint8_t *bytes, size_t length, int interval, uint8_t **out,
    size_t *out_length, char *message) {
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to = {.err = NULL};
    Errors errors;
    /* libjpeg frees its own first buffer when it needs a larger one, but reports the new address
     * only at the end: after an error in between, a buffer of libjpeg would be freed twice. So the
     * first buffer is ours. Half more than the input is rarely too short. */
    unsigned long size = length + length / 2 + 65536;
    unsigned char *const room = malloc(size), *written = room;
    *out = NULL, *out_length = 0;
    if (!room) return fail(message, NO_MEMORY, "out of memory");
    if (setjmp(errors.back)) {
        jpeg_destroy_compress(&to);
        jpeg_destroy_decompress(&from);
        free(room);
        return fail(message, errors.status, "%s", errors.text);
    }
    open_jpeg(&from, &errors, bytes, length);
    require_frame(&errors, bytes, length, 1);
    check_color(&from);
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(&from);
    to.err = from.err;
    jpeg_create_compress(&to);
    jpeg_mem_dest(&to, &written, &size);
    jpeg_copy_critical_parameters(&from, &to);
    to.optimize_coding = TRUE;
    to.restart_interval = interval;
    jpeg_write_coefficients(&to, coefficients);
    jpeg_finish_compress(&to);
    jpeg_destroy_compress(&to);
    /* jpeg_finish_decompress is not needed: the coefficients were read to the end of the file. */
    jpeg_destroy_decompress(&from);
    if (written != room) free(room);
    *out = written, *out_length = size;
    return OK;
}

API void densefeed_free(void *memory) { free(memory); }
