// Reads bytes and does nothing with them: the floor of any kernel that must read them.
#include <cuda_runtime.h>
#include <stdint.h>

__global__ void __launch_bounds__(512) read_only(const uint4* p, long long n, int* sink) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const long long step = (long long)gridDim.x * blockDim.x;
  uint32_t x = 0;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      v[j] = uint4{0, 0, 0, 0};
      if (i + j * step < n) asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(p + i + j * step), "l"(policy));
    }
#pragma unroll
    for (int j = 0; j < 8; j++) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (x == 0x12345678) *sink = 1;   // keeps the loads
}

extern "C" int kvfold_read_only(const void* p, long long bytes, void* sink, void* stream) {
  read_only<<<132 * 2, 512, 0, (cudaStream_t)stream>>>((const uint4*)p, bytes / 16, (int*)sink);
  return (int)cudaGetLastError();
}
