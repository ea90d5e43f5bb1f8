# shellcheck shell=bash
# Environment variables of a training process. Source this file before torchrun:
#   source launch/env.sh
# A variable that is already set keeps its value. `python -m megatron_rl.preflight` checks them all.
# Not here on purpose: which network to use (NCCL_SOCKET_IFNAME, NCCL_IB_HCA). NCCL finds it, and a
# wrong name copied from another cluster stops every job; set it per cluster when it must be chosen.

# One host thread per rank. Ranks share the cores, and the default (all cores for each) thrashes.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# One hardware queue for kernel launches: Megatron relies on launch order to overlap tensor-parallel
# communication with GEMMs on GPUs before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# Let the caching allocator grow segments: rollouts of varying length would otherwise fragment it.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# Needed with expandable segments: NCCL would register the buffers of captured CUDA graphs as one
# allocation each, which they then are not.
export NCCL_GRAPH_REGISTER="${NCCL_GRAPH_REGISTER:-0}"

# NCCL says what is wrong, and nothing else. INFO when hunting a network fault.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# A failed or timed-out collective ends the process, so that the job ends and is requeued.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"

# Keep the last 2000 collectives of each rank in memory and write them out on a timeout: they show
# which rank stands in which collective.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"

# For --max-restarts: torchrun would hand its first key-value store to the restarted ranks too, where
# Gloo finds the addresses of ranks that are dead and waits for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"

# Rank processes are forked into data and checkpoint workers after the tokenizer was used; its own
# threads would deadlock there.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

# Lines reach the log when they are printed, also those before a crash.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"

# A traceback of every thread when a process is killed by a fault or by SIGABRT.
export PYTHONFAULTHANDLER="${PYTHONFAULTHANDLER:-1}"
