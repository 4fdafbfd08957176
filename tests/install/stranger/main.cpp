#include <bonfire/bonfire.h>

#include <cstdio>

int main() {
  std::printf("bonfire %s on LibTorch %s, gpu: %s\n", BONFIRE_VERSION, BONFIRE_TORCH_VERSION,
              bonfire::gpu_available() ? "yes" : bonfire::gpu_unavailable_reason().c_str());
}
