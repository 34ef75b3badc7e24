// The kernel and the one function that Python calls.
#include "decode.cu"

extern "C" void* kernel_entry() {
    return reinterpret_cast<void*>(&emulator::Launch<decode_kernel>::run);
}
