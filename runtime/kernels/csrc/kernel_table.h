// What a compiled program calls of the kernels' library, by address: a program is linked to torch and to nothing else, and
// the way through torch's list of a program's operations takes as long as a small product. Put into every program, too.

struct SpecdecKernels {
  void (*share_loop)(void (*compute)(void*, int64_t, int64_t), void* of);
  AOTITorchError (*linear)(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t num_outputs,
                           int64_t arithmetic, AtenTensorHandle* output);
  AOTITorchError (*experts_linear)(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle chosen,
                                   int64_t num_outputs, int64_t arithmetic, int64_t token_bits,
                                   AtenTensorHandle* output);
  AOTITorchError (*quantized_linear)(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias,
                                     int64_t num_outputs, int64_t arithmetic, int64_t token_bits,
                                     AtenTensorHandle* output);
  AOTITorchError (*paged_attention)(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                                    AtenTensorHandle key_pool, AtenTensorHandle value_pool, AtenTensorHandle positions,
                                    AtenTensorHandle slots, AtenTensorHandle block_tables, double scale, int64_t window,
                                    int64_t arithmetic, AtenTensorHandle* scales, AtenTensorHandle* sinks, double softcap,
                                    int64_t attention_chunk, AtenTensorHandle* slopes, AtenTensorHandle* output);
};
