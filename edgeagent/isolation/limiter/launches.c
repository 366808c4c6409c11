/* The entry points that start GPU work, and those in which a program waits for it. */
#include "limiter.h"
#include "hooks.h"

/* `seen`: the stream as the driver's plain functions name it. */
#define LAUNCH(seen, CALL_DRIVER)               \
    struct lane *lane;                          \
    if (UNLIKELY(!compute_before(seen, &lane))) \
        return REFUSED;                         \
    CUresult result = CALL_DRIVER;              \
    compute_after(lane, seen, result);          \
    return result

#define PER_THREAD(stream) ((stream) == NULL ? CU_STREAM_PER_THREAD : (stream))

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                               unsigned int block_x, unsigned int block_y, unsigned int block_z,
                               unsigned int shared_bytes, CUstream stream, void **parameters, void **extra) {
    LAUNCH(stream, CALL(cuLaunchKernel, function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
                        stream, parameters, extra));
}

EXPORT CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                    unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                    unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                    void **parameters, void **extra) {
    LAUNCH(PER_THREAD(stream), CALL(cuLaunchKernel_ptsz, function, grid_x, grid_y, grid_z, block_x, block_y,
                                    block_z, shared_bytes, stream, parameters, extra));
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                                 void **extra) {
    CUstream stream = config == NULL ? NULL : config->hStream;
    LAUNCH(stream, CALL(cuLaunchKernelEx, config, function, parameters, extra));
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters,
                                      void **extra) {
    CUstream stream = config == NULL ? NULL : config->hStream;
    LAUNCH(PER_THREAD(stream), CALL(cuLaunchKernelEx_ptsz, config, function, parameters, extra));
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                          unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                          unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                          void **parameters) {
    LAUNCH(stream, CALL(cuLaunchCooperativeKernel, function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                        shared_bytes, stream, parameters));
}

EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                               unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                               unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                               void **parameters) {
    LAUNCH(PER_THREAD(stream), CALL(cuLaunchCooperativeKernel_ptsz, function, grid_x, grid_y, grid_z, block_x,
                                    block_y, block_z, shared_bytes, stream, parameters));
}

/* A share is one GPU, so the list has one launch. */
EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count,
                                                     unsigned int flags) {
    CUstream stream = list == NULL || count == 0 ? NULL : list[0].hStream;
    LAUNCH(stream, CALL(cuLaunchCooperativeKernelMultiDevice, list, count, flags));
}

EXPORT CUresult cuLaunch(CUfunction function) { LAUNCH(NULL, CALL(cuLaunch, function)); }

EXPORT CUresult cuLaunchGrid(CUfunction function, int width, int height) {
    LAUNCH(NULL, CALL(cuLaunchGrid, function, width, height));
}

EXPORT CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
    LAUNCH(stream, CALL(cuLaunchGridAsync, function, width, height, stream));
}

static CUresult graph_launched(CUresult result, CUgraphExec exec) {
    if (result == CUDA_SUCCESS)
        graphs_launched(exec);
    return result;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    LAUNCH(stream, graph_launched(CALL(cuGraphLaunch, exec, stream), exec));
}

EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
    LAUNCH(PER_THREAD(stream), graph_launched(CALL(cuGraphLaunch_ptsz, exec, stream), exec));
}

/* ---- waits ------------------------------------------------------------------------------------ */

/* The driver gives back what pools do not keep, and the lanes know how long they took. */
static CUresult waited(CUresult result) {
    compute_settle();
    pools_settle();
    return result;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) { return waited(CALL(cuStreamSynchronize, stream)); }

EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream) { return waited(CALL(cuStreamSynchronize_ptsz, stream)); }

EXPORT CUresult cuCtxSynchronize(void) {
    return waited(DRIVER(cuCtxSynchronize) ? DRIVER(cuCtxSynchronize)() : driver_lacks());
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext context) { return waited(CALL(cuCtxSynchronize_v2, context)); }

EXPORT CUresult cuEventSynchronize(CUevent event) { return waited(CALL(cuEventSynchronize, event)); }
