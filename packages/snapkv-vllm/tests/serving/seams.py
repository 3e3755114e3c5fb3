"""Every part of vLLM that the plugin stands on.

Each names the test in tests/serving/vllm/test_seams.py that fails first when vLLM changes it.
"""

from dataclasses import dataclass

VERSIONS = ("0.31", "0.32")
"""With which all of them were tested; `snapkv_vllm.versions` refuses older ones."""

BOTH = "both"
FIRST = "first"
SECOND = "second"
NONE = "-"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One of them.

    Attributes:
        parts: of vLLM, as the table shows them.
        purpose: what they are used for.
        runner: of which model runner they are a part, if of any.
        public: whether vLLM documents them.
        test: what looks at them.
    """

    parts: str
    purpose: str
    test: str
    runner: str = NONE
    public: str = "no"


SEAMS = (
    Seam(
        parts="entry point `vllm.general_plugins`",
        purpose="the block spec is known in every process",
        public="yes",
        test="test_the_plugin_is_found_and_does_nothing_by_itself",
    ),
    Seam(
        parts="`KVCacheSpecRegistry.register`, `_ensure_registered`",
        purpose="`blocks.py`: a manager that counts held tokens",
        public="the first",
        test="test_a_spec_of_ones_own_has_a_manager_of_ones_own",
    ),
    Seam(
        parts="`scheduler_cls`, `worker_cls`, `additional_config`",
        purpose="`scheduler.py`, `worker.py`, the settings",
        public="yes, without promise",
        test="test_scheduler_worker_and_settings_are_arguments",
    ),
    Seam(
        parts="`logits_processors`, `validate_params`",
        purpose="`requests.py`: wrong settings are refused; no engine loads it",
        public="yes",
        test="test_custom_logits_processors_are_found_by_name_and_asked_about_requests",
    ),
    Seam(
        parts="`Scheduler.grammar_compile_error_reqs`",
        purpose="requests with wrong settings end that no front end refused",
        test="test_the_scheduler_ends_requests_with_an_error",
    ),
    Seam(
        parts="`profile_run`",
        purpose="`rehearsal.py`: the largest votes are in the memory profile",
        runner=BOTH,
        test="test_workers_measure_their_memory_with_the_runners_profile_run",
    ),
    Seam(
        parts="`Scheduler._reserve_prefill_lookahead`",
        purpose="a step ends where a request is compressed",
        test="test_the_scheduler_asks_where_a_step_ends_for_every_request",
    ),
    Seam(
        parts="`Scheduler._get_local_prefix_cache_hit`, `coordinator.find_longest_cache_hit`, "
        "`create_kv_cache_blocks`",
        purpose="hits end before the window",
        test="test_the_scheduler_looks_up_prefixes_which_can_be_asked_to_end_earlier",
    ),
    Seam(
        parts="`Scheduler._update_after_schedule`, `_free_request`",
        purpose="orders are given; plans are forgotten",
        test="test_the_scheduler_moves_on_after_a_step_and_frees_requests",
    ),
    Seam(
        parts="`KVCacheManager.allocate_slots`, `Scheduler._preempt_request`, `evict_blocks`, "
        "`num_gpu_blocks`",
        purpose="what is kept has its blocks before the step; without, vLLM preempts",
        test="test_the_scheduler_preempts_where_a_step_gets_no_blocks",
    ),
    Seam(
        parts="`Request.num_computed_tokens`, `num_in_flight_tokens`",
        purpose="tokens that were read ahead are forgotten",
        test="test_the_scheduler_counts_what_is_computed_apart_from_what_is_under_way",
    ),
    Seam(
        parts="an attribute of `SchedulerOutput`",
        purpose="orders travel to the workers",
        test="test_scheduler_output_carries_further_attributes_between_processes",
    ),
    Seam(
        parts="`FullAttentionManager` and its base: `req_to_blocks`, `get_num_blocks_to_allocate`, "
        "`allocate_new_blocks`, `cache_blocks`, `pop_blocks_for_free`",
        purpose="blocks are counted in tokens held; a request is admitted by the most it will hold",
        test="test_blocks_are_counted_by_tokens",
    ),
    Seam(
        parts="`init_device` of the workers, `model_runner`",
        purpose="our runner is laid over the one that a worker made",
        runner=BOTH,
        test="test_workers_take_the_runner_that_they_made_themselves",
    ),
    Seam(
        parts="`get_kv_cache_spec`, `initialize_kv_cache`, `kv_cache_config`, "
        "`attn_groups[*][*].metadata_builders`",
        purpose="which layers are compressed; who is told lengths",
        runner=BOTH,
        test="test_both_runners_ask_for_specs_and_make_metadata_builders",
    ),
    Seam(
        parts="`execute_model`, and of its argument `finished_req_ids`, `preempted_req_ids`, "
        "`resumed_req_ids`, `scheduled_new_reqs`",
        purpose="the moment to vote, behind the model; requests that begin anew",
        runner=BOTH,
        test="test_a_step_says_which_requests_begin_anew",
    ),
    Seam(
        parts="`AttentionMetadataBuilder.build`, `build_for_cudagraph_capture`",
        purpose="`held.py`: attention is told the tokens held",
        runner=BOTH,
        test="test_metadata_is_built_from_lengths_that_can_be_replaced",
    ),
    Seam(
        parts="`CommonAttentionMetadata`: `replace`, `seq_lens`, `seq_lens_cpu_upper_bound`, "
        "`max_seq_len`, `_num_computed_tokens_cache`",
        purpose="those tokens, in a buffer of our own",
        runner=BOTH,
        test="test_lengths_stand_in_four_fields_of_the_metadata",
    ),
    Seam(
        parts="`Attention.impl.forward`, `scale`, `logits_soft_cap`, `sinks`; `Attention.kv_cache`",
        purpose="queries and how they vote; where keys and values lie",
        runner=BOTH,
        test="test_attention_calls_its_implementation_with_the_queries_first",
    ),
    Seam(
        parts="`AttentionImpl.do_kv_cache_update`, `num_heads`, `num_kv_heads`; "
        "`AttentionMetadataBuilder.layer_names`; fields that the backends' metadata has in common",
        purpose="`heads/`: heads of different length are sequences with one KV head",
        runner=BOTH,
        test="test_backends_attend_and_store_for_any_number_of_heads",
    ),
    Seam(
        parts="`CommonAttentionMetadata.slot_mapping`, by which layers store; slots below 0",
        purpose="`heads/attention.py`: the plain path stores none of their tokens",
        runner=BOTH,
        test="test_layers_store_by_the_slots_that_builders_see",
    ),
    Seam(
        parts="`MLAAttention.forward_impl`, `kv_cache`, `scale`, `W_UK_T`, `qk_nope_head_dim`",
        purpose="the same of latent attention",
        runner=BOTH,
        test="test_latent_attention_takes_queries_first_and_keeps_the_matrix_that_turns_them",
    ),
    Seam(
        parts="`_prepare_inputs`, `query_start_loc`, `positions`, `input_ids`, "
        "`input_batch.block_table[...].compute_slot_mapping`",
        purpose="new tokens go behind those held; the prompt's last ones are read ahead",
        runner=FIRST,
        test="test_the_first_runner_prepares_slots_before_it_runs_the_model",
    ),
    Seam(
        parts="`requests[...].block_ids`, `input_batch.req_id_to_index`, `block_table.add_row`, "
        "`clear_row`",
        purpose="a compressed request goes on with the blocks it was left",
        runner=FIRST,
        test="test_the_first_runner_keeps_block_lists_and_rows",
    ),
    Seam(
        parts="`sample_tokens`, `discard_request_mask`, `input_batch.generators`",
        purpose="a prompt that is still being read draws nothing from its seed",
        runner=FIRST,
        test="test_the_first_runner_takes_back_what_a_prompt_drew_from_its_seed",
    ),
    Seam(
        parts="`_is_uniform_decode`",
        purpose="no graph of a whole step is replayed where queries are put aside",
        runner=FIRST,
        test="test_the_first_runner_asks_whether_all_requests_decode",
    ),
    Seam(
        parts="`prepare_attn`, `block_tables.compute_slot_mappings`, `slot_mappings`; of the batch "
        "`input_ids`, `positions`",
        purpose="new tokens go behind those held; the prompt's last ones are read ahead",
        runner=SECOND,
        test="test_the_second_runner_prepares_slots_before_it_runs_the_model",
    ),
    Seam(
        parts="`block_tables.block_tables[*].stage_write`, `num_blocks`, "
        "`req_states.req_id_to_index`",
        purpose="a compressed request goes on with the blocks it was left",
        runner=SECOND,
        test="test_the_second_runner_stages_writes_of_block_tables",
    ),
    Seam(
        parts="`req_states.num_computed_tokens`",
        purpose="what was read ahead is forgotten, where the device counts for itself",
        runner=SECOND,
        test="test_the_second_runner_counts_on_the_device_what_is_computed",
    ),
    Seam(
        parts="`gather_batch_req_state`",
        purpose="no graph of a whole step is replayed where queries are put aside",
        runner=SECOND,
        test="test_the_second_runner_says_whether_all_requests_decode",
    ),
    Seam(
        parts="names of the processes that vLLM starts",
        purpose="`lifetime.py`: those and no others end with what started them",
        test="test_processes_have_the_names_by_which_they_are_known",
    ),
    Seam(
        parts="`get_tp_group`, `get_pp_group`, `is_first_rank`",
        purpose="`metrics.py`: one process of an engine tells the time of compressions",
        test="test_a_worker_knows_whether_it_is_the_first_of_its_engine",
    ),
    Seam(
        parts="`entrypoints.launchers`: `make_arg_parser`, `build_async_engine_client`, "
        "`build_app`, `init_app_state`",
        purpose="`ray.py`: an engine and its web application in a replica",
        test="test_a_web_application_is_made_over_an_engine",
    ),
)
