"""Everything of vLLM that this plugin subclasses, patches, makes, calls or relies on.

One table. `versions` looks an unknown release up in it before the plugin starts, the tests look the
installed one up and look in the plugin's own files for what is missing here, and
``make test-coupling`` looks through the files of any release.
"""

from pathlib import Path

from snapkv_vllm.sources import Difference, Part, Release

_BACKENDS = "v1.attention.backends"
_OPENAI = "entrypoints.openai"
_LAUNCHERS = "entrypoints.launchers"
_STORED = "layer key value kv_cache slot_mapping"
_ATTENDS = {
    "forward": "layer query key value kv_cache attn_metadata output ...",
    "do_kv_cache_update": _STORED,
}
_OF_HEADS = "num_heads num_kv_heads scale logits_soft_cap sinks alibi_slopes"
_SEQUENCES = (
    "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping"
)
_BUILD = {"build": "common_prefix_len common_attn_metadata fast_build ..."}
_RUNNER = {
    "get_kv_cache_spec": "",
    "initialize_kv_cache": "kv_cache_config ...",
    "execute_model": "scheduler_output ...",
    "profile_run": "...",
}
_OF_RUNNERS = "attn_groups device dtype kv_cache_config max_num_reqs vllm_config"
_ORDER_OF_KEYS = {"": ["kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"]}

SCHEDULING = (
    Part(
        "v1.core.sched.scheduler.Scheduler",
        "subclassed",
        signatures={
            "add_request": "request",
            "_free_request": "request ...",
            "reset_prefix_cache": "reset_running_requests reset_connector",
            "_get_local_prefix_cache_hit": "request ...",
            "_preempt_request": "request ...",
            "_reserve_prefill_lookahead": "request num_computed_tokens num_new_tokens",
            "_update_after_schedule": "scheduler_output",
        },
        attributes="vllm_config connector kv_cache_manager kv_cache_config requests running "
        "num_spec_tokens "
        "grammar_compile_error_reqs",
        steps={
            # It asks where a step ends, looks prefixes up, preempts, and moves on at the end.
            "schedule": [
                "self._reserve_prefill_lookahead(",
                "kv_cache_manager.allocate_slots(",
                "self._preempt_request(",
                "self._get_local_prefix_cache_hit(request",
                "self._reserve_prefill_lookahead(",
                "kv_cache_manager.allocate_slots(",
                "self._update_after_schedule(scheduler_output)",
                "return scheduler_output",
            ],
            # Less may be computed than a step had tokens, and requests may end with an error.
            "_update_after_schedule": ["request.num_computed_tokens += num_scheduled_token"],
            "_make_cached_request_data": ["num_computed_tokens"],
            "update_from_output": ["self.grammar_compile_error_reqs"],
        },
    ),
    Part("v1.core.sched.async_scheduler.AsyncScheduler", "subclassed"),
    Part(
        "v1.core.sched.output.SchedulerOutput",
        "extended",
        attributes="finished_req_ids preempted_req_ids scheduled_new_reqs scheduled_cached_reqs "
        "num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens "
        "scheduled_encoder_inputs",
    ),
    Part("v1.core.sched.output.NewRequestData", "read", attributes="req_id"),
    Part(
        "v1.core.sched.output.CachedRequestData",
        "read, copied",
        attributes="req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids "
        "num_computed_tokens num_output_tokens",
    ),
    Part(
        "v1.request.Request",
        "read, changed",
        attributes="request_id status num_computed_tokens num_prompt_tokens num_tokens "
        "block_hashes prompt_token_ids all_token_ids mm_features resumable sampling_params "
        "lora_request cache_salt skip_reading_prefix_cache",
    ),
    Part(
        "v1.request.RequestStatus",
        "read",
        attributes="RUNNING FINISHED_LENGTH_CAPPED FINISHED_STOPPED",
    ),
    Part(
        "v1.core.kv_cache_manager.KVCacheManager",
        "patched",
        signatures={
            "allocate_slots": "request num_new_tokens num_new_computed_tokens ...",
            "create_kv_cache_blocks": "blocks",
        },
        attributes="coordinator block_pool empty_kv_cache_blocks",
        steps={
            "allocate_slots": [
                "self.coordinator.get_num_blocks_to_allocate(",
                "required_blocks > available_blocks",
                "self.coordinator.allocate_new_blocks(",
            ]
        },
    ),
    Part("v1.core.kv_cache_manager.KVCacheBlocks", "read", attributes="blocks"),
    Part(
        "v1.core.kv_cache_coordinator.KVCacheCoordinator",
        "patched",
        signatures={
            "cache_blocks": "request num_computed_tokens",
            "find_longest_cache_hit": "block_hashes max_cache_hit_length",
            "get_num_blocks_to_allocate": "request_id num_tokens new_computed_blocks "
            "num_encoder_tokens total_computed_tokens num_local_computed_tokens "
            "num_tokens_main_model apply_admission_cap ...",
        },
        attributes="single_type_managers",
    ),
    Part(
        "v1.core.block_pool.BlockPool",
        "called",
        signatures={
            "evict_blocks": "block_ids",
            "free_blocks": "ordered_blocks ...",
            "get_new_blocks": "num_blocks",
            "get_num_free_blocks": "",
            "touch": "blocks",
        },
        attributes="num_gpu_blocks",
    ),
    Part("v1.core.kv_cache_utils.KVCacheBlock", "read", attributes="block_id ref_cnt"),
)
BLOCKS = (
    Part(
        "v1.core.single_type_kv_cache_manager.FullAttentionManager",
        "subclassed",
        signatures={
            "_has_partial_local_hit": "new_computed_blocks ...",
            "add_local_computed_blocks": "request_id new_computed_blocks num_local_computed_tokens "
            "num_external_computed_tokens",
            "allocate_new_blocks": "request_id num_tokens num_tokens_main_model",
            "cache_blocks": "request num_tokens ...",
            "get_num_blocks_to_allocate": "request_id num_tokens new_computed_blocks "
            "total_computed_tokens num_local_computed_tokens num_tokens_main_model "
            "apply_admission_cap ...",
            "pop_blocks_for_free": "request_id",
        },
        attributes="block_pool block_size enable_caching kv_cache_group_id num_cached_block "
        "req_to_blocks",
        steps={"free": ["pop_blocks_for_free"]},
    ),
    Part(
        "v1.kv_cache_interface.FullAttentionSpec",
        "subclassed",
        signatures={"max_memory_usage_bytes": "vllm_config"},
        attributes="block_size num_kv_heads head_size dtype page_size_bytes sliding_window "
        "attention_chunk_size",
    ),
    Part("v1.kv_cache_interface.MLAAttentionSpec", "subclassed"),
    Part("v1.kv_cache_interface.UniformTypeKVCacheSpecs", "read", attributes="kv_cache_specs"),
    Part("v1.kv_cache_interface.KVCacheConfig", "read", attributes="kv_cache_groups num_blocks"),
    Part("v1.kv_cache_interface.KVCacheGroupSpec", "read", attributes="kv_cache_spec layer_names"),
    Part(
        "v1.kv_cache_spec_registry.KVCacheSpecRegistry",
        "registered with",
        signatures={
            "_ensure_registered": "...",
            "register": "kvcache_spec_cls manager_class uniform_type_base_spec",
        },
    ),
    Part("utils.math_utils.cdiv", "called", signatures={"": "a b"}),
)
RUNNERS = (
    Part(
        "v1.worker.gpu.model_runner.GPUModelRunner",
        "laid over",
        signatures={
            **_RUNNER,
            "gather_batch_req_state": "scheduler_output dummy_run",
            "prepare_attn": "input_batch",
        },
        attributes=f"{_OF_RUNNERS} req_states block_tables",
        steps={
            "execute_model": [
                "self.update_requests(",
                "self.block_tables.apply_staged_writes(",
                "batch_req_state, uniform_tok_count = self.gather_batch_req_state(",
                "self.prepare_inputs(",
                "self.prepare_attn(input_batch)",
                "self.model_state.prepare_attn(",
            ],
            "postprocess_num_computed_tokens": ["self.req_states.num_computed_tokens.gpu,"],
            "prepare_inputs": ["self.input_buffers.input_ids"],
        },
    ),
    Part(
        "v1.worker.gpu.input_batch.InputBatch",
        "read",
        attributes="req_ids num_reqs idx_mapping input_ids positions query_start_loc "
        "query_start_loc_np num_tokens_after_padding",
    ),
    Part(
        "v1.worker.gpu.states.RequestState",
        "read, changed",
        attributes="req_id_to_index num_computed_tokens",
    ),
    Part(
        "v1.worker.gpu.block_table.BlockTables",
        "called, changed",
        signatures={
            "compute_slot_mappings": "idx_mapping query_start_loc positions num_tokens_padded out"
        },
        attributes="block_tables num_blocks slot_mappings",
        steps={
            "append_block_ids": [
                "self.block_tables[i].stage_write(req_index, start, block_ids)",
                "self.num_blocks.np[i, req_index] = end",
            ]
        },
    ),
    # One tensor of slots for a group goes to the metadata and to the layers.
    Part(
        "v1.worker.gpu.attn_utils",
        "relied on",
        steps={"build_attn_metadata": ["slot_mapping=slot_mapping"]},
        signatures={"build_slot_mappings_by_layer": "slot_mappings kv_cache_config"},
    ),
    Part(
        "v1.worker.gpu_model_runner.GPUModelRunner",
        "laid over",
        signatures={
            **_RUNNER,
            "_prepare_inputs": "scheduler_output ...",
            "_is_uniform_decode": "...",
            "sample_tokens": "...",
        },
        attributes=f"{_OF_RUNNERS} discard_request_mask input_batch input_ids positions "
        "query_start_loc requests",
        steps={
            # It prepares slots before it runs the model, by rows and lists of blocks.
            "_prepare_inputs": ["self.query_start_loc.np", "compute_slot_mapping("],
            "_preprocess": ["self.input_ids.gpu[:"],
            "execute_model": [
                "self._update_states(",
                "self._prepare_inputs(",
                "self._determine_batch_execution_and_padding(",
                "self._build_attention_metadata(",
                "self._model_forward(",
            ],
            "_build_attention_metadata": [
                "self.seq_lens[:num_reqs_padded]",
                "cm.slot_mapping = slot_mappings[kv_cache_gid]",
            ],
            "_get_slot_mappings": ["slot_mappings_by_layer[layer_name] = slot_mapping"],
            "_update_states": ["self.input_batch.req_id_to_index"],
            "_determine_batch_execution_and_padding": ["self._is_uniform_decode("],
            # It takes back what a prompt drew from its seed.
            "sample_tokens": ["self._sample(", "self._bookkeeping_sync("],
            "_bookkeeping_sync": [
                "self.discard_request_mask.np[:num_reqs]",
                "self.input_batch.generators.get(int(i))",
            ],
        },
    ),
    Part(
        "v1.worker.gpu_input_batch.InputBatch",
        "read, changed",
        attributes="num_reqs req_ids req_id_to_index block_table generators",
        steps={"_make_sampling_metadata": ["generators=self.generators"]},
    ),
    Part("v1.worker.gpu_input_batch.CachedRequestState", "read, changed", attributes="block_ids"),
    Part(
        "v1.worker.block_table.BlockTable",
        "called",
        signatures={"compute_slot_mapping": "num_reqs query_start_loc positions"},
    ),
    Part(
        "v1.worker.block_table.MultiGroupBlockTable",
        "called",
        signatures={"add_row": "block_ids row_idx", "clear_row": "row_idx"},
    ),
    *(
        Part(
            f"v1.worker.{worker}",
            "subclassed",
            signatures={"init_device": ""},
            attributes="model_config model_runner",
        )
        for worker in ("cpu_worker.CPUWorker", "gpu_worker.Worker")
    ),
    Part(
        "v1.worker.gpu_worker.Worker",
        "subclassed",
        steps={
            "determine_available_memory": [
                "self.model_runner.profile_run(",
                "memory_profiling(",
                "self.model_runner.profile_run(",
            ]
        },
    ),
    Part("platforms.current_platform", "called"),
    Part("platforms.interface.Platform", "called", signatures={"is_cpu": ""}),
    Part("distributed.get_pp_group", "called", signatures={"": ""}),
    Part("distributed.get_tp_group", "called", signatures={"": ""}),
    Part("distributed.parallel_state.GroupCoordinator", "read", attributes="is_first_rank"),
    Part("logger.init_logger", "called", signatures={"": "name"}),
)
ATTENTION = (
    Part(
        "v1.attention.backend.CommonAttentionMetadata",
        "changed",
        signatures={"replace": "..."},
        attributes="seq_lens seq_lens_cpu_upper_bound max_seq_len slot_mapping block_table_tensor "
        "_num_computed_tokens_cache",
    ),
    Part(
        "v1.attention.backend.AttentionMetadataBuilder",
        "patched",
        signatures=_BUILD,
        attributes="layer_names",
        steps={
            "build_for_cudagraph_capture": ["self.build("],
            "build_for_drafting": ["self.build("],
        },
    ),
    Part("v1.attention.backend.AttentionBackend", "called", signatures={"get_name": ""}),
    Part("v1.worker.utils.AttentionGroup", "read", attributes="metadata_builders"),
    Part("model_executor.layers.attention.Attention", "read"),
    Part(
        "model_executor.layers.attention.attention.Attention",
        "read",
        signatures={"get_attn_backend": ""},
        attributes="impl kv_cache num_heads num_kv_heads head_size",
        steps={"forward": ["self.impl"]},
    ),
    Part(
        "model_executor.layers.attention.MLAAttention",
        "patched",
        signatures={"forward_impl": "q ..."},
        attributes="kv_cache scale kv_lora_rank qk_nope_head_dim",
        steps={
            "process_weights_after_loading": [
                'replace_parameter(self, "W_UK_T", W_UK.permute(1, 2, 0)'
            ]
        },
    ),
    Part("v1.attention.backends.cpu_attn.CPUAttentionBackendImpl", "patched", _ATTENDS, _OF_HEADS),
    Part(
        f"{_BACKENDS}.cpu_attn.CPUAttentionMetadataBuilder",
        "patched",
        _BUILD,
        attributes="dtype head_dim isa kv_cache_dtype window_size",
    ),
    Part(
        f"{_BACKENDS}.cpu_attn.CPUAttentionMetadata",
        "made",
        attributes=f"{_SEQUENCES} scheduler_metadata causal",
    ),
    Part(f"{_BACKENDS}.flash_attn.FlashAttentionImpl", "patched", _ATTENDS, _OF_HEADS),
    Part(
        f"{_BACKENDS}.flash_attn.FlashAttentionMetadataBuilder",
        "patched",
        _BUILD,
        steps={"build": ["seq_lens = common_attn_metadata.seq_lens\n"]},
    ),
    Part(
        f"{_BACKENDS}.flash_attn.FlashAttentionMetadata",
        "made",
        attributes=f"{_SEQUENCES} scheduler_metadata",
    ),
    Part(f"{_BACKENDS}.flash_attn", "relied on", steps=_ORDER_OF_KEYS),
    Part(f"{_BACKENDS}.triton_attn.TritonAttentionImpl", "patched", _ATTENDS, _OF_HEADS),
    Part(
        f"{_BACKENDS}.triton_attn.TritonAttentionMetadataBuilder",
        "patched",
        _BUILD,
        steps={
            "build": ["seq_lens = common_attn_metadata.seq_lens\n"],
            "build_for_cudagraph_capture": ["self.build("],
        },
    ),
    Part(
        f"{_BACKENDS}.triton_attn.TritonAttentionMetadata",
        "made",
        attributes=f"{_SEQUENCES} seq_threshold_3D",
    ),
    Part(f"{_BACKENDS}.triton_attn", "relied on", steps=_ORDER_OF_KEYS),
    Part(
        "_custom_ops",
        "called",
        signatures={
            "cpu_attn_reshape_and_cache": "key value key_cache value_cache slot_mapping isa ...",
            "cpu_attn_get_scheduler_metadata": "num_reqs num_heads num_kv_heads head_dim seq_lens "
            "dtype query_start_loc causal sliding_window_size isa enable_kv_split ...",
        },
    ),
    Part("envs", "read", attributes="VLLM_API_KEY VLLM_CPU_ATTN_SPLIT_KV"),
)
CONFIGURATION = (
    Part(
        "config.VllmConfig",
        "read",
        attributes="additional_config cache_config compilation_config kv_transfer_config "
        "load_config lora_config model_config parallel_config scheduler_config "
        "speculative_config use_v2_model_runner",
    ),
    Part(
        "config.ModelConfig",
        "read",
        signatures={"get_total_num_kv_heads": "", "get_vocab_size": ""},
        attributes="dtype enable_sleep_mode hf_overrides is_attention_free is_encoder_decoder "
        "logits_processors max_model_len model quantization runner_type served_model_name "
        "trust_remote_code use_mla uses_mrope",
    ),
    Part(
        "config.ParallelConfig",
        "read",
        attributes="_api_process_count data_parallel_index data_parallel_size "
        "decode_context_parallel_size distributed_executor_backend tensor_parallel_size "
        "pipeline_parallel_size "
        "use_ubatching world_size",
    ),
    Part(
        "config.SchedulerConfig",
        "read",
        attributes="async_scheduling long_prefill_token_threshold max_num_batched_tokens "
        "max_num_seqs",
    ),
    Part("config.CacheConfig", "read", attributes="cache_dtype mamba_cache_mode"),
    Part("config.CompilationConfig", "read", attributes="cudagraph_mode static_forward_context"),
    Part("config.LoadConfig", "read", attributes="load_format"),
    Part("config.SpeculativeConfig", "read", attributes="method"),
    Part(
        "config.compilation.CUDAGraphMode",
        "read",
        signatures={"mixed_mode": ""},
        attributes="FULL",
    ),
    Part(
        "engine.arg_utils.EngineArgs",
        "set",
        attributes="worker_cls scheduler_cls additional_config logits_processors model "
        "served_model_name kv_cache_memory_bytes gpu_memory_utilization tensor_parallel_size "
        "pipeline_parallel_size data_parallel_size",
    ),
    Part(
        "engine.arg_utils.AsyncEngineArgs",
        "made",
        signatures={"from_cli_args": "args", "create_engine_config": "..."},
    ),
)
FRONT_END = (
    Part("SamplingParams", "made", attributes="extra_args prompt_logprobs temperature max_tokens"),
    Part(
        "v1.sample.logits_processor.LogitsProcessor",
        "subclassed",
        signatures={"validate_params": "sampling_params"},
    ),
    Part(
        "v1.worker.gpu.sample.logits_processor.LogitsProcessor",
        "subclassed",
        signatures={"validate_params": "sampling_params"},
    ),
    Part("v1.engine.exceptions.EngineDeadError", "caught"),
    Part(
        "v1.engine.async_llm.AsyncLLM",
        "called",
        signatures={
            "generate": "prompt sampling_params request_id ...",
            "collective_rpc": "method timeout args kwargs",
            "check_health": "",
            "get_supported_tasks": "",
        },
        attributes="model_config",
    ),
    Part("model_executor.models.utils.extract_layer_index", "called", {"": "layer_name ..."}),
    Part(
        "renderers.online_renderer.OnlineRenderer",
        "patched",
        signatures={
            "render_completion": "request ...",
            "render_chat": "request ...",
            "create_error_response": "message err_type status_code ...",
            "preprocess_completion": "request prompt_input prompt_embeds skip_mm_cache",
        },
        attributes="renderer",
    ),
    Part(
        "renderers.base.BaseRenderer.validate_token_ids",
        "called",
        {"": "token_ids parameter"},
        optional=True,  # 0.31 has none
    ),
    Part(
        f"{_OPENAI}.completion.serving.OpenAIServingCompletion",
        "relied on",
        steps={"": ["self.online_renderer.render_comp"]},
    ),
    Part(
        f"{_OPENAI}.chat_completion.serving.OpenAIServingChat",
        "relied on",
        steps={"": ["self.online_renderer.render_chat("]},
    ),
    Part(
        f"{_OPENAI}.completion.protocol.CompletionRequest",
        "made, changed",
        attributes="prompt vllm_xargs echo prompt_logprobs prompt_embeds truncate_prompt_tokens "
        "kv_transfer_params max_tokens add_special_tokens",
    ),
    Part(
        f"{_OPENAI}.chat_completion.protocol.ChatCompletionRequest",
        "made, changed",
        attributes="messages vllm_xargs echo prompt_logprobs truncate_prompt_tokens "
        "kv_transfer_params",
    ),
    Part("entrypoints.serve.engine.protocol.ErrorResponse", "read", attributes="error"),
    Part("entrypoints.serve.create_error_response", "called", {"": "message ..."}),
    Part(
        "entrypoints.common.cli_args.make_arg_parser or "
        "entrypoints.launchers.cli_args.make_arg_parser",
        "called",
        {"": "parser"},
    ),
    Part(f"{_LAUNCHERS}.api_server.entry.build_async_engine_client", "called", {"": "args ..."}),
    Part(f"{_LAUNCHERS}.app.build_app", "called", {"": "args supported_tasks model_config"}),
    Part(
        f"{_LAUNCHERS}.api_server.app_state.init_app_state",
        "called",
        signatures={"": "engine_client state args supported_tasks"},
        steps={
            "": [
                "state.engine_client = ",
                "state.args = ",
                "state.openai_serving_models = ",
                "state.online_renderer = ",
            ]
        },
    ),
    Part(
        "entrypoints.cli.serve.ServeSubcommand",
        "called",
        signatures={"subparser_init": "subparsers", "validate": "args", "cmd": "args"},
    ),
    Part(
        "entrypoints.common.startup.cli_env_setup or "
        "entrypoints.serve.utils.api_utils.cli_env_setup",
        "called",
        {"": ""},
    ),
    Part("outputs.RequestError", "made", attributes="code message", optional=True),  # from 0.33
    Part("utils.argparse_utils.FlexibleArgumentParser", "made"),
    # Processes have the names by which they are known (`plugin.PROCESSES`).
    Part(
        "v1.engine.utils.CoreEngineProcManager",
        "relied on",
        steps={"": ['name=f"EngineCore_DP{global_index}" if is_dp else "EngineCore"']},
    ),
    Part(
        "v1.executor.multiproc_executor.WorkerProc",
        "relied on",
        steps={"": ['name=f"VllmWorker-{rank}"']},
    ),
    Part("v1.utils.APIServerProcessManager", "relied on", steps={"": ['name=f"ApiServer_{i}"']}),
)

TABLE: tuple[Part, ...] = (
    *SCHEDULING,
    *BLOCKS,
    *RUNNERS,
    *ATTENTION,
    *CONFIGURATION,
    *FRONT_END,
)


def differences(place: Path) -> list[Difference]:
    """What the vLLM in a wheel, or in the folder that holds ``vllm``, has otherwise."""
    return Release(place).differences(TABLE)
