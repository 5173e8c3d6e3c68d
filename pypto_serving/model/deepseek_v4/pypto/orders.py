"""The order in which pypto-lib's DeepSeek V4 Flash programs take their arguments. Torch-free.

Names with spaces between.
"""

from __future__ import annotations

PREFILL = (
    "x_hc hc_attn_fn hc_attn_scale hc_attn_base attn_norm_w wq_a wq_b wq_b_scale wkv gamma_cq gamma_ckv kv_cache "
    "attn_sink wo_a wo_b wo_b_scale hca_cmp_kv csa_cmp_kv hca_cmp_wkv hca_cmp_wgate hca_cmp_ape hca_cmp_norm_w "
    "hca_compress_state csa_cmp_wkv csa_cmp_wgate csa_cmp_ape csa_cmp_norm_w csa_compress_state csa_hadamard_idx "
    "csa_idx_wq_b csa_idx_wq_b_scale csa_weights_proj csa_inner_wkv csa_inner_wgate csa_inner_ape "
    "csa_inner_norm_w csa_inner_compress_state idx_kv_cache idx_kv_scale hca_compress_state_block_table "
    "csa_compress_state_block_table csa_inner_compress_state_block_table freqs_cos freqs_sin ori_block_table "
    "hca_cmp_block_table csa_cmp_block_table idx_block_table ori_slot_mapping position_ids input_ids "
    "hca_cmp_slot_mapping hca_state_slot_mapping csa_cmp_slot_mapping csa_idx_slot_mapping csa_state_slot_mapping "
    "csa_inner_state_slot_mapping hc_ffn_fn hc_ffn_scale hc_ffn_base norm_w gate_w gate_bias tid2eid routed_w1 "
    "routed_w1_scale routed_w3 routed_w3_scale routed_w2 routed_w2_scale shared_w1 shared_w1_scale shared_w3 "
    "shared_w3_scale shared_w2 shared_w2_scale hc_head_fn hc_head_scale hc_head_base final_norm_w "
    "pre_hc_hidden_out lm_head_weight hidden_out logits num_tokens_per_owner logit_row_indices"
)
"""Those of l3_prefill_fwd."""

DECODE = (
    "embed_weight hc_attn_fn hc_attn_scale hc_attn_base attn_norm_w wq_a wq_b wq_b_scale wkv gamma_cq gamma_ckv "
    "kv_cache attn_sink wo_a wo_b wo_b_scale hca_cmp_wkv hca_cmp_wgate hca_cmp_ape hca_cmp_norm_w "
    "hca_compress_state csa_cmp_wkv csa_cmp_wgate csa_cmp_ape csa_cmp_norm_w csa_compress_state csa_idx_wq_b "
    "csa_idx_wq_b_scale csa_weights_proj csa_hadamard_idx csa_inner_wkv csa_inner_wgate csa_inner_ape "
    "csa_inner_norm_w csa_inner_compress_state hca_cmp_kv csa_cmp_kv idx_kv_cache idx_kv_scale hc_ffn_fn "
    "hc_ffn_scale hc_ffn_base norm_w gate_w gate_bias tid2eid routed_w1 routed_w1_scale routed_w3 routed_w3_scale "
    "routed_w2 routed_w2_scale shared_w1 shared_w1_scale shared_w3 shared_w3_scale shared_w2 shared_w2_scale "
    "freqs_cos freqs_sin block_table position_ids kv_seq_lens hca_compress_state_block_table "
    "csa_compress_state_block_table csa_inner_compress_state_block_table hca_cmp_block_table csa_cmp_block_table "
    "idx_block_table block_counts input_ids hc_head_fn hc_head_scale hc_head_base final_norm_w pre_hc_hidden_out "
    "lm_head_weight hidden_out logits sampled_ids num_tokens_per_owner logit_row_indices"
)
"""Those of l3_decode_fwd."""

DECODE_MTP = (
    "mtp_tail_token_ids mtp_tail_positions mtp_tail_pre_hc_pool mtp_accepted_counts mtp_tail_slot_ids "
    "mtp_state_generations mtp_state_tokens mtp_state_meta mtp_position_ids mtp_enorm_w mtp_hnorm_w mtp_e_proj_w "
    "mtp_e_proj_w_scale mtp_e_proj_smooth mtp_h_proj_w mtp_h_proj_w_scale mtp_h_proj_smooth mtp_hc_attn_fn "
    "mtp_hc_attn_scale mtp_hc_attn_base mtp_attn_norm_w mtp_wq_a mtp_wq_b mtp_wq_b_scale mtp_wkv mtp_gamma_cq "
    "mtp_gamma_ckv mtp_kv_cache mtp_attn_sink mtp_wo_a mtp_wo_b mtp_wo_b_scale mtp_hc_ffn_fn mtp_hc_ffn_scale "
    "mtp_hc_ffn_base mtp_norm_w mtp_gate_w mtp_gate_bias mtp_tid2eid mtp_input_ids mtp_routed_w1 "
    "mtp_routed_w1_scale mtp_routed_w3 mtp_routed_w3_scale mtp_routed_w2 mtp_routed_w2_scale mtp_shared_w1 "
    "mtp_shared_w1_scale mtp_shared_w3 mtp_shared_w3_scale mtp_shared_w2 mtp_shared_w2_scale mtp_mtp_hc_head_fn "
    "mtp_mtp_hc_head_scale mtp_mtp_hc_head_base mtp_mtp_norm_w mtp_hidden_out mtp_next_pre_hc_hidden mtp_logits "
    "mtp_sampled_ids mtp_logit_row_indices mtp_num_tokens"
)
"""What l3_decode_fwd_mtp takes after those of l3_decode_fwd."""

PREFILL_MTP = (
    "hidden_states prev_hidden_states enorm_w hnorm_w e_proj_w e_proj_w_scale e_proj_smooth h_proj_w "
    "h_proj_w_scale h_proj_smooth hc_attn_fn hc_attn_scale hc_attn_base attn_norm_w wq_a wq_b wq_b_scale wkv "
    "gamma_cq gamma_ckv freqs_cos freqs_sin kv_cache ori_block_table ori_slot_mapping position_ids attn_sink wo_a "
    "wo_b wo_b_scale hc_ffn_fn hc_ffn_scale hc_ffn_base norm_w gate_w gate_bias tid2eid input_ids routed_w1 "
    "routed_w1_scale routed_w3 routed_w3_scale routed_w2 routed_w2_scale shared_w1 shared_w1_scale shared_w3 "
    "shared_w3_scale shared_w2 shared_w2_scale mtp_hc_head_fn mtp_hc_head_scale mtp_hc_head_base mtp_norm_w "
    "lm_head_weight hidden_out pre_hc_hidden_out logits logit_row_indices num_tokens"
)
"""Those of l3_mtp_prefill_fwd."""
