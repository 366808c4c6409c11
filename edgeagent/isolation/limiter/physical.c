/* Virtual memory management: physical memory, handles to it, and where it is mapped.
 *
 * Physical memory lives as long as a handle or a mapping of it does. Each allocation has a number of
 * ours, since a handle's value may come again while the memory that it named is still mapped.
 */
#include "limiter.h"
#include "hooks.h"

static struct lock physical_lock;
static uint64_t last_physical;

/* With the lock held: one handle or mapping less. */
static void drop_physical(uint64_t number) {
    struct record physical;
    if (!records_take(RECORD_PHYSICAL, number, &physical))
        return;
    if (physical.count > 1)
        records_put(RECORD_PHYSICAL, number, physical.bytes, physical.owner, physical.count - 1);
    else
        account_uncharge(physical.bytes);
}

enum { CHARGED, FREE_OF_CHARGE }; /* `owner` of a RECORD_PHYSICAL */

static void know_physical(CUmemHandle handle, uint64_t bytes, uint64_t charging) {
    lock_take(&physical_lock);
    uint64_t number = ++last_physical;
    records_put(RECORD_PHYSICAL, number, bytes, charging, 1);
    records_put(RECORD_HANDLE, handle, 0, number, 1);
    lock_give(&physical_lock);
}

EXPORT CUresult cuMemCreate(CUmemHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    if (!account_attach())
        return REFUSED;
    bool counted = properties == NULL || memory_counts(&properties->location);
    uint64_t cost = counted ? memory_round_up(bytes) : 0;
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMemCreate, handle, bytes, properties, flags);
    if (result == CUDA_SUCCESS)
        know_physical(*handle, cost, counted ? CHARGED : FREE_OF_CHARGE);
    else
        account_uncharge(cost);
    return result;
}

/* Its size shows only when it is mapped: charged there. */
EXPORT CUresult cuMemImportFromShareableHandle(CUmemHandle *handle, void *os_handle, int type) {
    if (!account_attach())
        return REFUSED;
    CUresult result = CALL(cuMemImportFromShareableHandle, handle, os_handle, type);
    if (result == CUDA_SUCCESS)
        know_physical(*handle, 0, CHARGED);
    return result;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemHandle handle,
                         unsigned long long flags) {
    struct record of_handle, physical;
    uint64_t more = 0;
    if (!account_attach())
        return REFUSED;
    lock_take(&physical_lock);
    bool known = records_get(RECORD_HANDLE, handle, &of_handle) &&
                 records_get(RECORD_PHYSICAL, of_handle.owner, &physical);
    if (known && physical.owner == CHARGED && bytes <= SIZE_MAX - offset && bytes + offset > physical.bytes)
        more = bytes + offset - physical.bytes;
    if (more != 0 && !memory_charge(more)) {
        lock_give(&physical_lock);
        return REFUSED;
    }
    CUresult result = CALL(cuMemMap, address, bytes, offset, handle, flags);
    if (result != CUDA_SUCCESS) {
        account_uncharge(more);
    } else if (known) {
        records_put(RECORD_PHYSICAL, of_handle.owner, physical.bytes + more, physical.owner, physical.count + 1);
        records_put(RECORD_MAPPING, address, bytes, of_handle.owner, 1);
    }
    lock_give(&physical_lock);
    return result;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    struct record mapping;
    lock_take(&physical_lock);
    CUresult result = CALL(cuMemUnmap, address, bytes);
    for (CUdeviceptr at = address; result == CUDA_SUCCESS && at - address < bytes; at += mapping.bytes) {
        if (!records_take(RECORD_MAPPING, at, &mapping) || mapping.bytes == 0)
            break;
        drop_physical(mapping.owner);
    }
    lock_give(&physical_lock);
    return result;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemHandle *handle, void *address) {
    struct record of_handle, mapping, physical;
    lock_take(&physical_lock);
    CUresult result = CALL(cuMemRetainAllocationHandle, handle, address);
    if (result == CUDA_SUCCESS) {
        if (records_get(RECORD_HANDLE, *handle, &of_handle))
            records_put(RECORD_HANDLE, *handle, 0, of_handle.owner, of_handle.count + 1);
        else if ((records_get(RECORD_MAPPING, memory_key(address), &mapping) ||
                  records_covering(RECORD_MAPPING, memory_key(address), &mapping)) &&
                 records_get(RECORD_PHYSICAL, mapping.owner, &physical)) {
            records_put(RECORD_PHYSICAL, mapping.owner, physical.bytes, physical.owner, physical.count + 1);
            records_put(RECORD_HANDLE, *handle, 0, mapping.owner, 1);
        }
    }
    lock_give(&physical_lock);
    return result;
}

EXPORT CUresult cuMemRelease(CUmemHandle handle) {
    struct record of_handle;
    lock_take(&physical_lock);
    bool known = records_take(RECORD_HANDLE, handle, &of_handle);
    CUresult result = CALL(cuMemRelease, handle);
    if (known && (result != CUDA_SUCCESS || of_handle.count > 1))
        records_put(RECORD_HANDLE, handle, 0, of_handle.owner, of_handle.count - (result == CUDA_SUCCESS));
    else if (known)
        drop_physical(of_handle.owner);
    lock_give(&physical_lock);
    return result;
}

void physical_reset(void) { atomic_store_explicit(&physical_lock.word, 0, memory_order_relaxed); }
