/* Every driver entry point that the limiter knows: an X-macro list, included where it is expanded.
 *
 * ENTRY(symbol, name, version, stream, effect): one that the limiter replaces.
 *   symbol   the name that libcuda.so.1 exports
 *   name     the name by which cuGetProcAddress is asked for it
 *   version  the CUDA version from which that name means this symbol (12030 is 12.3)
 *   stream   PLAIN, or PTSZ for the per-thread-default-stream twin
 *   effect   ALLOCATES: an unknown newer version of it is refused rather than let through
 * HELPER(symbol): one that the limiter only calls.
 */
#ifndef HELPER
#define HELPER(symbol)
#endif
#ifndef ENTRY
#define ENTRY(symbol, name, version, stream, effect)
#endif

/* How a program finds entry points */
ENTRY(cuGetProcAddress, "cuGetProcAddress", 11030, PLAIN, OTHER)
ENTRY(cuGetProcAddress_v2, "cuGetProcAddress", 12000, PLAIN, OTHER)

/* What a program is told */
ENTRY(cuDeviceTotalMem, "cuDeviceTotalMem", 2000, PLAIN, OTHER)
ENTRY(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, PLAIN, OTHER)
ENTRY(cuMemGetInfo, "cuMemGetInfo", 2000, PLAIN, OTHER)
ENTRY(cuMemGetInfo_v2, "cuMemGetInfo", 3020, PLAIN, OTHER)

/* Contexts: the fixed overhead is charged with the first; with one its memory goes */
ENTRY(cuCtxCreate, "cuCtxCreate", 2000, PLAIN, ALLOCATES)
ENTRY(cuCtxCreate_v2, "cuCtxCreate", 3020, PLAIN, ALLOCATES)
ENTRY(cuCtxCreate_v3, "cuCtxCreate", 11040, PLAIN, ALLOCATES)
ENTRY(cuCtxCreate_v4, "cuCtxCreate", 12050, PLAIN, ALLOCATES)
ENTRY(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, PLAIN, ALLOCATES)
ENTRY(cuCtxDestroy, "cuCtxDestroy", 2000, PLAIN, OTHER)
ENTRY(cuCtxDestroy_v2, "cuCtxDestroy", 4000, PLAIN, OTHER)
ENTRY(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", 7000, PLAIN, OTHER)
ENTRY(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, PLAIN, OTHER)
ENTRY(cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset", 7000, PLAIN, OTHER)
ENTRY(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, PLAIN, OTHER)

/* Plain device memory */
ENTRY(cuMemAlloc, "cuMemAlloc", 2000, PLAIN, ALLOCATES)
ENTRY(cuMemAlloc_v2, "cuMemAlloc", 3020, PLAIN, ALLOCATES)
ENTRY(cuMemAllocPitch, "cuMemAllocPitch", 2000, PLAIN, ALLOCATES)
ENTRY(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, PLAIN, ALLOCATES)
ENTRY(cuMemAllocManaged, "cuMemAllocManaged", 6000, PLAIN, ALLOCATES)
ENTRY(cuMemFree_v2, "cuMemFree", 3020, PLAIN, OTHER)

/* Stream-ordered pools */
ENTRY(cuMemAllocAsync, "cuMemAllocAsync", 11020, PLAIN, ALLOCATES)
ENTRY(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020, PTSZ, ALLOCATES)
ENTRY(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, PLAIN, ALLOCATES)
ENTRY(cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 11020, PTSZ, ALLOCATES)
ENTRY(cuMemFreeAsync, "cuMemFreeAsync", 11020, PLAIN, OTHER)
ENTRY(cuMemFreeAsync_ptsz, "cuMemFreeAsync", 11020, PTSZ, OTHER)
ENTRY(cuMemPoolCreate, "cuMemPoolCreate", 11020, PLAIN, OTHER)
ENTRY(cuMemPoolDestroy, "cuMemPoolDestroy", 11020, PLAIN, OTHER)
ENTRY(cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020, PLAIN, OTHER)

/* Virtual memory management */
ENTRY(cuMemCreate, "cuMemCreate", 10020, PLAIN, ALLOCATES)
ENTRY(cuMemRelease, "cuMemRelease", 10020, PLAIN, OTHER)
ENTRY(cuMemMap, "cuMemMap", 10020, PLAIN, ALLOCATES)
ENTRY(cuMemUnmap, "cuMemUnmap", 10020, PLAIN, OTHER)
ENTRY(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, PLAIN, OTHER)
ENTRY(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020, PLAIN, ALLOCATES)

/* Memory of other APIs */
ENTRY(cuImportExternalMemory, "cuImportExternalMemory", 10000, PLAIN, ALLOCATES)
ENTRY(cuDestroyExternalMemory, "cuDestroyExternalMemory", 10000, PLAIN, OTHER)

/* Arrays */
ENTRY(cuArrayCreate, "cuArrayCreate", 2000, PLAIN, ALLOCATES)
ENTRY(cuArrayCreate_v2, "cuArrayCreate", 3020, PLAIN, ALLOCATES)
ENTRY(cuArray3DCreate, "cuArray3DCreate", 2000, PLAIN, ALLOCATES)
ENTRY(cuArray3DCreate_v2, "cuArray3DCreate", 3020, PLAIN, ALLOCATES)
ENTRY(cuArrayDestroy, "cuArrayDestroy", 2000, PLAIN, OTHER)
ENTRY(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000, PLAIN, ALLOCATES)
ENTRY(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000, PLAIN, OTHER)

/* Host memory: the same DRAM on an integrated GPU, free of charge on a card */
ENTRY(cuMemHostAlloc, "cuMemHostAlloc", 2020, PLAIN, ALLOCATES)
ENTRY(cuMemAllocHost, "cuMemAllocHost", 2000, PLAIN, ALLOCATES)
ENTRY(cuMemAllocHost_v2, "cuMemAllocHost", 3020, PLAIN, ALLOCATES)
ENTRY(cuMemFreeHost, "cuMemFreeHost", 2000, PLAIN, OTHER)
ENTRY(cuMemHostRegister, "cuMemHostRegister", 4000, PLAIN, ALLOCATES)
ENTRY(cuMemHostRegister_v2, "cuMemHostRegister", 6050, PLAIN, ALLOCATES)
ENTRY(cuMemHostUnregister, "cuMemHostUnregister", 4000, PLAIN, OTHER)

/* Memory of graphs */
ENTRY(cuGraphAddMemAllocNode, "cuGraphAddMemAllocNode", 11040, PLAIN, ALLOCATES)
ENTRY(cuGraphAddMemFreeNode, "cuGraphAddMemFreeNode", 11040, PLAIN, OTHER)
ENTRY(cuGraphAddNode, "cuGraphAddNode", 12020, PLAIN, ALLOCATES)
ENTRY(cuGraphAddNode_v2, "cuGraphAddNode", 12030, PLAIN, ALLOCATES)
ENTRY(cuGraphAddNode_v3, "cuGraphAddNode", 13040, PLAIN, ALLOCATES)
ENTRY(cuGraphInstantiate, "cuGraphInstantiate", 10000, PLAIN, OTHER)
ENTRY(cuGraphInstantiate_v2, "cuGraphInstantiate", 11000, PLAIN, OTHER)
ENTRY(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", 11040, PLAIN, OTHER)
ENTRY(cuGraphInstantiateWithParams, "cuGraphInstantiateWithParams", 12000, PLAIN, OTHER)
ENTRY(cuGraphInstantiateWithParams_ptsz, "cuGraphInstantiateWithParams", 12000, PTSZ, OTHER)
ENTRY(cuGraphExecDestroy, "cuGraphExecDestroy", 10000, PLAIN, OTHER)
ENTRY(cuGraphDestroy, "cuGraphDestroy", 10000, PLAIN, OTHER)
ENTRY(cuStreamEndCapture, "cuStreamEndCapture", 10000, PLAIN, OTHER)
ENTRY(cuStreamEndCapture_ptsz, "cuStreamEndCapture", 10000, PTSZ, OTHER)
ENTRY(cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim", 11040, PLAIN, OTHER)

/* Work for the GPU */
ENTRY(cuLaunchKernel, "cuLaunchKernel", 4000, PLAIN, OTHER)
ENTRY(cuLaunchKernel_ptsz, "cuLaunchKernel", 7000, PTSZ, OTHER)
ENTRY(cuLaunchKernelEx, "cuLaunchKernelEx", 11060, PLAIN, OTHER)
ENTRY(cuLaunchKernelEx_ptsz, "cuLaunchKernelEx", 11060, PTSZ, OTHER)
ENTRY(cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel", 9000, PLAIN, OTHER)
ENTRY(cuLaunchCooperativeKernel_ptsz, "cuLaunchCooperativeKernel", 9000, PTSZ, OTHER)
ENTRY(cuLaunchCooperativeKernelMultiDevice, "cuLaunchCooperativeKernelMultiDevice", 9000, PLAIN, OTHER)
ENTRY(cuLaunch, "cuLaunch", 2000, PLAIN, OTHER)
ENTRY(cuLaunchGrid, "cuLaunchGrid", 2000, PLAIN, OTHER)
ENTRY(cuLaunchGridAsync, "cuLaunchGridAsync", 2000, PLAIN, OTHER)
ENTRY(cuGraphLaunch, "cuGraphLaunch", 10000, PLAIN, OTHER)
ENTRY(cuGraphLaunch_ptsz, "cuGraphLaunch", 10000, PTSZ, OTHER)

/* Waits: pools give memory back and GPU time is settled here */
ENTRY(cuStreamSynchronize, "cuStreamSynchronize", 2000, PLAIN, OTHER)
ENTRY(cuStreamSynchronize_ptsz, "cuStreamSynchronize", 7000, PTSZ, OTHER)
ENTRY(cuCtxSynchronize, "cuCtxSynchronize", 2000, PLAIN, OTHER)
ENTRY(cuCtxSynchronize_v2, "cuCtxSynchronize", 13000, PLAIN, OTHER)
ENTRY(cuEventSynchronize, "cuEventSynchronize", 2000, PLAIN, OTHER)

HELPER(cuCtxGetCurrent)
HELPER(cuCtxGetDevice)
HELPER(cuDeviceGetMemPool)
HELPER(cuMemPoolGetAttribute)
HELPER(cuDeviceGetGraphMemAttribute)
HELPER(cuDevicePrimaryCtxGetState)
HELPER(cuEventCreate)
HELPER(cuEventDestroy_v2)
HELPER(cuEventRecord)
HELPER(cuEventQuery)
HELPER(cuEventElapsedTime)
HELPER(cuStreamIsCapturing)
HELPER(cuStreamGetCaptureInfo_v2)
HELPER(cuThreadExchangeStreamCaptureMode)

#undef ENTRY
#undef HELPER
