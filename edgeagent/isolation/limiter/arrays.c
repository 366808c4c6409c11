/* Arrays and mipmapped arrays: what they cost follows from their format. */
#include "limiter.h"
#include "hooks.h"

/* Bits of one texel of `channels` channels; the most it could be where the format is not known. */
static uint64_t texel_bits(unsigned int format, unsigned int channels) {
    switch (format) {
    case 0x01: case 0x08: /* 8-bit integers */
        return 8ull * channels;
    case 0x02: case 0x09: case 0x10: /* 16-bit integers, half */
        return 16ull * channels;
    case 0x03: case 0x0a: case 0x20: /* 32-bit integers, float */
        return 32ull * channels;
    case 0xb0: /* NV12 */
        return 12;
    case 0x91: case 0x92: case 0x97: case 0x98: /* BC1, BC4: 8 bytes for 4x4 */
        return 4;
    case 0x93: case 0x94: case 0x95: case 0x96: case 0x99: case 0x9a: case 0x9b: case 0x9c: case 0x9d: case 0x9e:
        return 8; /* BC2, 3, 5, 6, 7: 16 bytes for 4x4 */
    case 0xc0: case 0xc6: /* normalised 8-bit, 1, 2, 4 channels */
        return 8;
    case 0xc1: case 0xc7: case 0xc3: case 0xc9:
        return 16;
    case 0xc2: case 0xc8: case 0xc4: case 0xca: case 0x50:
        return 32;
    case 0xc5: case 0xcb:
        return 64;
    default:
        return 128;
    }
}

static uint64_t at_least_one(uint64_t value) { return value == 0 ? 1 : value; }

/* Saturates: what cannot be multiplied cannot be allocated. */
static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    uint64_t width = at_least_one(d->Width), height = at_least_one(d->Height), depth = at_least_one(d->Depth);
    uint64_t bits = texel_bits(d->Format, d->NumChannels), total = 0;
    if (d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0; /* backed by cuMemCreate */
    for (unsigned int level = 0; level < at_least_one(levels) && level < 64; level++) {
        uint64_t texels = times(times(width, height), depth), bytes = times(texels, bits);
        bytes = bytes == UINT64_MAX ? UINT64_MAX / 2 : bytes / 8;
        total = total > UINT64_MAX / 2 - bytes ? UINT64_MAX / 2 : total + bytes;
        width = at_least_one(width / 2);
        height = at_least_one(height / 2);
        if (!(d->Flags & CUDA_ARRAY3D_LAYERED))
            depth = at_least_one(depth / 2);
    }
    return memory_round_up(total);
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *description) {
    uint64_t cost = description == NULL ? 0 : array_bytes(description, 1);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuArray3DCreate_v2, array, description);
    return memory_keep(result, RECORD_ARRAY, result == CUDA_SUCCESS ? memory_key(*array) : 0, cost);
}

EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d) {
    uint64_t cost = 0;
    if (d != NULL) {
        CUDA_ARRAY3D_DESCRIPTOR wide = {d->Width, d->Height, 0, d->Format, d->NumChannels, 0};
        cost = array_bytes(&wide, 1);
    }
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuArrayCreate_v2, array, d);
    return memory_keep(result, RECORD_ARRAY, result == CUDA_SUCCESS ? memory_key(*array) : 0, cost);
}

EXPORT CUresult cuArrayDestroy(CUarray array) {
    struct record taken;
    bool known = records_take(RECORD_ARRAY, memory_key(array), &taken);
    CUresult result = CALL(cuArrayDestroy, array);
    return known ? memory_let_go(result, &taken) : result;
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *description,
                                       unsigned int levels) {
    uint64_t cost = description == NULL ? 0 : array_bytes(description, levels);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMipmappedArrayCreate, array, description, levels);
    return memory_keep(result, RECORD_MIPMAP, result == CUDA_SUCCESS ? memory_key(*array) : 0, cost);
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    struct record taken;
    bool known = records_take(RECORD_MIPMAP, memory_key(array), &taken);
    CUresult result = CALL(cuMipmappedArrayDestroy, array);
    return known ? memory_let_go(result, &taken) : result;
}

/* The entry points of before CUDA 3.2, whose descriptors are others: closed. */
EXPORT CUresult cuArrayCreate(CUarray *array, const void *description) {
    (void)array, (void)description;
    return REFUSED;
}

EXPORT CUresult cuArray3DCreate(CUarray *array, const void *description) {
    (void)array, (void)description;
    return REFUSED;
}
