/* The entry points that take memory, and those that tell how much there is.
 *
 * One pattern: charge, ask the driver, take the charge back if it refused, remember what the handle
 * cost. When freeing: forget first, since another thread may be given the same handle the moment the
 * driver has it back.
 */
#include "limiter.h"
#include "hooks.h"

#define GRANULE 512u /* the driver gives out no less */

uint64_t memory_round_up(uint64_t bytes) {
    return bytes > UINT64_MAX - GRANULE ? bytes : (bytes + GRANULE - 1) & ~(uint64_t)(GRANULE - 1);
}

bool memory_charge(uint64_t bytes) {
    if (UNLIKELY(!account_attach()))
        return false;
    if (LIKELY(account_charge(bytes)))
        return true;
    pools_settle();
    graphs_settle();
    if (account_charge(bytes))
        return true;
    account_refused(bytes);
    return false;
}

uint64_t memory_key(const void *handle) { return (uint64_t)(uintptr_t)handle; }

/* After the driver answered: keep the charge under the handle, or give it back. */
CUresult memory_keep(CUresult result, enum record_kind kind, uint64_t key, uint64_t bytes) {
    CUcontext context = NULL;
    if (result != CUDA_SUCCESS) {
        account_uncharge(bytes);
        return result;
    }
    (void)CALL(cuCtxGetCurrent, &context);
    records_put(kind, key, bytes, memory_key(context), 1); /* if that fails the charge stays: it errs upwards */
    return result;
}

/* Around a free: `taken` is what was forgotten before the driver was asked. */
CUresult memory_let_go(CUresult result, const struct record *taken) {
    if (result == CUDA_SUCCESS)
        account_uncharge(taken->bytes);
    else
        records_put(taken->kind, taken->key, taken->bytes, taken->owner, taken->count);
    return result;
}

/* Whether memory at a place is the GPU's. */
bool memory_counts(const CUmemLocation *location) {
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE || location->type == CU_MEM_LOCATION_TYPE_INVALID ||
           account_limits()->unified;
}

/* ---- what a program is told ------------------------------------------------------------------- */

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    if (!account_know_limits())
        return REFUSED;
    CUresult result = CALL(cuDeviceTotalMem_v2, bytes, device);
    if (result == CUDA_SUCCESS && bytes != NULL && *bytes > account_limits()->memory_bytes)
        *bytes = account_limits()->memory_bytes;
    return result;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (!account_attach())
        return REFUSED;
    CUresult result = CALL(cuMemGetInfo_v2, free, total);
    if (result != CUDA_SUCCESS)
        return result;
    pools_settle();
    graphs_settle();
    uint64_t limit = account_limits()->memory_bytes, used = account_used();
    uint64_t left = used < limit ? limit - used : 0;
    if (free != NULL && *free > left)
        *free = left;
    if (total != NULL && *total > limit)
        *total = limit;
    return result;
}

static unsigned int fit(size_t bytes) { return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes; }

EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    size_t wide = 0;
    CUresult result = cuDeviceTotalMem_v2(&wide, device);
    if (result == CUDA_SUCCESS && bytes != NULL)
        *bytes = fit(wide);
    return result;
}

EXPORT CUresult cuMemGetInfo(unsigned int *free, unsigned int *total) {
    size_t wide_free = 0, wide_total = 0;
    CUresult result = cuMemGetInfo_v2(&wide_free, &wide_total);
    if (result == CUDA_SUCCESS && free != NULL)
        *free = fit(wide_free);
    if (result == CUDA_SUCCESS && total != NULL)
        *total = fit(wide_total);
    return result;
}

/* ---- plain device memory ---------------------------------------------------------------------- */

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    uint64_t cost = memory_round_up(bytes);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMemAlloc_v2, pointer, bytes);
    return memory_keep(result, RECORD_DEVICE, result == CUDA_SUCCESS ? *pointer : 0, cost);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    uint64_t cost = memory_round_up(bytes);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMemAllocManaged, pointer, bytes, flags);
    return memory_keep(result, RECORD_DEVICE, result == CUDA_SUCCESS ? *pointer : 0, cost);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                                   unsigned int element) {
    uint64_t row = memory_round_up(width), cost; /* the pitch is known only afterwards */
    if (__builtin_mul_overflow(row, height, &cost) || !memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMemAllocPitch_v2, pointer, pitch, width, height, element);
    if (result == CUDA_SUCCESS && *pitch > row) {
        uint64_t more = (*pitch - row) * height;
        if (!memory_charge(more)) {
            (void)CALL(cuMemFree_v2, *pointer);
            result = REFUSED;
        } else {
            cost += more;
        }
    }
    return memory_keep(result, RECORD_DEVICE, result == CUDA_SUCCESS ? *pointer : 0, cost);
}

/* The entry points of before CUDA 3.2, with 32-bit pointers: closed. */
EXPORT CUresult cuMemAlloc(unsigned int *pointer, unsigned int bytes) {
    (void)pointer, (void)bytes;
    return REFUSED;
}

EXPORT CUresult cuMemAllocPitch(unsigned int *pointer, unsigned int *pitch, unsigned int width,
                                unsigned int height, unsigned int element) {
    (void)pointer, (void)pitch, (void)width, (void)height, (void)element;
    return REFUSED;
}

/* ---- memory of other APIs --------------------------------------------------------------------- */

EXPORT CUresult cuImportExternalMemory(CUexternalMemory *memory,
                                       const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description) {
    uint64_t cost = description == NULL ? 0 : memory_round_up(description->size);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuImportExternalMemory, memory, description);
    return memory_keep(result, RECORD_EXTERNAL, result == CUDA_SUCCESS ? memory_key(*memory) : 0, cost);
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    struct record taken;
    bool known = records_take(RECORD_EXTERNAL, memory_key(memory), &taken);
    CUresult result = CALL(cuDestroyExternalMemory, memory);
    return known ? memory_let_go(result, &taken) : result;
}

/* ---- host memory: the GPU's own on an integrated one ------------------------------------------- */

static bool charge_host(uint64_t bytes, uint64_t *cost) {
    *cost = 0;
    if (!account_attach())
        return false;
    if (!account_limits()->unified)
        return true;
    *cost = memory_round_up(bytes);
    return memory_charge(*cost);
}

static CUresult keep_host(CUresult result, enum record_kind kind, void *pointer, uint64_t cost) {
    return cost == 0 ? result : memory_keep(result, kind, memory_key(pointer), cost);
}

EXPORT CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    uint64_t cost;
    if (!charge_host(bytes, &cost))
        return REFUSED;
    CUresult result = CALL(cuMemHostAlloc, pointer, bytes, flags);
    return keep_host(result, RECORD_HOST, result == CUDA_SUCCESS ? *pointer : NULL, cost);
}

EXPORT CUresult cuMemAllocHost_v2(void **pointer, size_t bytes) {
    uint64_t cost;
    if (!charge_host(bytes, &cost))
        return REFUSED;
    CUresult result = CALL(cuMemAllocHost_v2, pointer, bytes);
    return keep_host(result, RECORD_HOST, result == CUDA_SUCCESS ? *pointer : NULL, cost);
}

EXPORT CUresult cuMemAllocHost(void **pointer, unsigned int bytes) { return cuMemAllocHost_v2(pointer, bytes); }

EXPORT CUresult cuMemFreeHost(void *pointer) {
    struct record taken;
    bool known = records_take(RECORD_HOST, memory_key(pointer), &taken);
    CUresult result = CALL(cuMemFreeHost, pointer);
    return known ? memory_let_go(result, &taken) : result;
}

EXPORT CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned int flags) {
    uint64_t cost;
    if (!charge_host(bytes, &cost))
        return REFUSED;
    CUresult result = CALL(cuMemHostRegister, pointer, bytes, flags);
    return keep_host(result, RECORD_REGISTERED, pointer, cost);
}

EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags) {
    uint64_t cost;
    if (!charge_host(bytes, &cost))
        return REFUSED;
    CUresult result = CALL(cuMemHostRegister_v2, pointer, bytes, flags);
    return keep_host(result, RECORD_REGISTERED, pointer, cost);
}

EXPORT CUresult cuMemHostUnregister(void *pointer) {
    struct record taken;
    bool known = records_take(RECORD_REGISTERED, memory_key(pointer), &taken);
    CUresult result = CALL(cuMemHostUnregister, pointer);
    return known ? memory_let_go(result, &taken) : result;
}
