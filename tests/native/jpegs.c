/* Write JPEGs for the tests and read their contents, with libjpeg alone and no code under test.
 * Errors end the process, so the input must be valid, except that of count_warnings. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <setjmp.h>
#include <jpeglib.h>

/* Encode `pixels` [height][width][components]. The first component is sampled h x v, the others
 * 1 x 1. `rgb`: store the planes as R, G, B, not as Y, Cb, Cr. Free the result with free_jpeg. */
size_t write_jpeg(const uint8_t *pixels, int height, int width, int components, int h, int v,
    int rgb, int progressive, int arithmetic, int restart, int quality, uint8_t **out) {
    struct jpeg_compress_struct to;
    struct jpeg_error_mgr errors;
    unsigned long size = 0;
    *out = NULL;
    to.err = jpeg_std_error(&errors);
    jpeg_create_compress(&to);
    jpeg_mem_dest(&to, out, &size);
    to.image_height = height, to.image_width = width, to.input_components = components;
    to.in_color_space = components == 1 ? JCS_GRAYSCALE : components == 3 ? JCS_RGB : JCS_CMYK;
    jpeg_set_defaults(&to);
    if (rgb) jpeg_set_colorspace(&to, JCS_RGB);
    jpeg_set_quality(&to, quality, TRUE);
    for (int n = 0; n < components; n++)
        to.comp_info[n].h_samp_factor = n ? 1 : h, to.comp_info[n].v_samp_factor = n ? 1 : v;
    to.arith_code = arithmetic;
    to.restart_interval = restart;
    if (progressive) jpeg_simple_progression(&to);
    jpeg_start_compress(&to, TRUE);
    for (int y = 0; y < height; y++) {
        JSAMPROW row = (JSAMPROW)pixels + (size_t)y * width * components;
        jpeg_write_scanlines(&to, &row, 1);
    }
    jpeg_finish_compress(&to);
    jpeg_destroy_compress(&to);
    return size;
}

void free_jpeg(uint8_t *jpeg) { free(jpeg); }

/* Read the contents of a JPEG: for each component its sampling factors, its size in blocks, its
 * quantization table, and its coefficients in natural order. They are written to `numbers` if it is
 * not NULL. Returns how many numbers there are. */
size_t read_jpeg(const uint8_t *jpeg, size_t length, int16_t *numbers) {
    struct jpeg_decompress_struct from;
    struct jpeg_error_mgr errors;
    size_t count = 0;
    from.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&from);
    jpeg_mem_src(&from, jpeg, length);
    jpeg_read_header(&from, TRUE);
    jvirt_barray_ptr *arrays = jpeg_read_coefficients(&from);
    for (int n = 0; n < from.num_components; n++) {
        jpeg_component_info *c = &from.comp_info[n];
        int16_t head[4] = {c->h_samp_factor, c->v_samp_factor, (int16_t)c->height_in_blocks,
            (int16_t)c->width_in_blocks};
        for (int k = 0; k < 4; k++, count++)
            if (numbers) numbers[count] = head[k];
        for (int k = 0; k < DCTSIZE2; k++, count++)
            if (numbers) numbers[count] = (int16_t)c->quant_table->quantval[k];
        for (JDIMENSION y = 0; y < c->height_in_blocks; y++) {
            JBLOCKARRAY row =
                from.mem->access_virt_barray((j_common_ptr)&from, arrays[n], y, 1, FALSE);
            if (numbers) memcpy(numbers + count, row[0][0], c->width_in_blocks * sizeof(JBLOCK));
            count += (size_t)c->width_in_blocks * DCTSIZE2;
        }
    }
    jpeg_destroy_decompress(&from);
    return count;
}

static jmp_buf back;
static void jump(j_common_ptr common) { (void)common, longjmp(back, 1); }
static void ignore(j_common_ptr common) { (void)common; }

/* Decode a JPEG to pixels. Returns how many warnings libjpeg counted, -1 after an error. */
long count_warnings(const uint8_t *jpeg, size_t length) {
    static struct jpeg_decompress_struct from;
    static struct jpeg_error_mgr errors;
    from.err = jpeg_std_error(&errors);
    errors.error_exit = jump, errors.output_message = ignore;
    if (setjmp(back)) {
        jpeg_destroy_decompress(&from);
        return -1;
    }
    jpeg_create_decompress(&from);
    jpeg_mem_src(&from, jpeg, length);
    jpeg_read_header(&from, TRUE);
    jpeg_start_decompress(&from);
    JSAMPARRAY row = from.mem->alloc_sarray((j_common_ptr)&from, JPOOL_IMAGE,
        from.output_width * from.output_components, 1);
    while (from.output_scanline < from.output_height) jpeg_read_scanlines(&from, row, 1);
    jpeg_finish_decompress(&from);
    long warnings = errors.num_warnings;
    jpeg_destroy_decompress(&from);
    return warnings;
}
