/* Contexts: the fixed overhead is charged with the first, and with one its memory goes. */
#include "limiter.h"
#include "hooks.h"

#define DEVICES 64

static CUcontext _Atomic primaries[DEVICES]; /* the primary context of each device, once seen */

EXPORT CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    return account_attach() ? CALL(cuCtxCreate, context, flags, device) : REFUSED;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    return account_attach() ? CALL(cuCtxCreate_v2, context, flags, device) : REFUSED;
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *context, void *affinity, int count, unsigned int flags,
                               CUdevice device) {
    return account_attach() ? CALL(cuCtxCreate_v3, context, affinity, count, flags, device) : REFUSED;
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned int flags, CUdevice device) {
    return account_attach() ? CALL(cuCtxCreate_v4, context, parameters, flags, device) : REFUSED;
}

/* ---- the end of a context --------------------------------------------------------------------- */

typedef CUresult destroy_call(CUcontext context);

/* Forgotten first: another thread may be given the same addresses the moment they are free. */
static CUresult destroy(destroy_call *driver, CUcontext context) {
    if (driver == NULL)
        return driver_lacks();
    compute_forget(context);
    uint64_t bytes = context == NULL ? 0 : records_drop_context(memory_key(context));
    CUresult result = driver(context);
    if (result == CUDA_SUCCESS)
        account_uncharge(bytes);
    return result;
}

EXPORT CUresult cuCtxDestroy(CUcontext context) { return destroy(DRIVER(cuCtxDestroy), context); }

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) { return destroy(DRIVER(cuCtxDestroy_v2), context); }

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (!account_attach())
        return REFUSED;
    CUresult result = CALL(cuDevicePrimaryCtxRetain, context, device);
    if (result == CUDA_SUCCESS && device >= 0 && device < DEVICES)
        atomic_store_explicit(&primaries[device], *context, memory_order_relaxed);
    return result;
}

typedef CUresult device_call(CUdevice device);

/* Releasing ends the primary context when nobody else holds it, resetting always. */
static CUresult end_primary(device_call *driver, CUdevice device) {
    unsigned int flags;
    int active = 1;
    CUcontext primary = NULL;
    if (driver == NULL)
        return driver_lacks();
    if (device >= 0 && device < DEVICES)
        primary = atomic_load_explicit(&primaries[device], memory_order_relaxed);
    if (primary != NULL)
        compute_forget(primary);
    CUresult result = driver(device);
    if (primary != NULL && result == CUDA_SUCCESS &&
        CALL(cuDevicePrimaryCtxGetState, device, &flags, &active) == CUDA_SUCCESS && !active) {
        account_uncharge(records_drop_context(memory_key(primary)));
        pools_forget();
        graphs_forget();
    }
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxRelease), device);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxRelease_v2), device);
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxReset), device);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxReset_v2), device);
}

void contexts_reset(void) {
    for (int i = 0; i < DEVICES; i++)
        atomic_store_explicit(&primaries[i], NULL, memory_order_relaxed);
}
