// Calls of a compiled program into the kernels' library, compiled into every program behind `kernel_table.h`: the kernels, and
// replacements of OpenMP's entry points with hidden visibility, so that a program's own loops find these, and the rest of
// the process finds OpenMP's. A parallel region has one loop, whose iterations the compiler
// divides among the reported number of threads, and no synchronization between them. So its threads need not exist at once:
// they become tasks, which the kernels' threads take one after the other.

#define SPECDEC_HIDDEN __attribute__((visibility("hidden")))

static const SpecdecKernels& specdec_kernels() {
  static const auto* kernels = [] {
    uint64_t stack[1] = {0};
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_call_dispatcher("specdec::kernel_table", "", stack));
    return reinterpret_cast<const SpecdecKernels*>(stack[0]);
  }();
  return *kernels;
}

// By the names that the compiler makes of the operations'.
#define aoti_torch_cpu_linear specdec_kernels().linear
#define aoti_torch_cpu_experts_linear specdec_kernels().experts_linear
#define aoti_torch_cpu_quantized_linear specdec_kernels().quantized_linear
#define aoti_torch_cpu_paged_attention specdec_kernels().paged_attention

static thread_local int specdec_part = 0, specdec_num_parts = 1;

struct SpecdecLoop {
  void (*body)(void*);
  void* data;
};

static void specdec_compute(void* of, int64_t part, int64_t num_parts) {
  const auto* loop = static_cast<const SpecdecLoop*>(of);
  specdec_part = static_cast<int>(part), specdec_num_parts = static_cast<int>(num_parts);
  loop->body(loop->data);
  specdec_part = 0, specdec_num_parts = 1;
}

SPECDEC_HIDDEN void GOMP_parallel(void (*body)(void*), void* data, unsigned, unsigned) {
  SpecdecLoop loop{body, data};
  specdec_kernels().share_loop(specdec_compute, &loop);
}
SPECDEC_HIDDEN void GOMP_barrier() {}  // behind the one loop
SPECDEC_HIDDEN int omp_get_thread_num() noexcept { return specdec_part; }
SPECDEC_HIDDEN int omp_get_num_threads() noexcept { return specdec_num_parts; }
SPECDEC_HIDDEN int omp_get_max_threads() noexcept { return 256; }  // as many parts as there may be: `package.cpp`
