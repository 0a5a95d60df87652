"""Post-training objectives as pure functions of log-probabilities.

Each takes tensors and keyword hyper-parameters and returns ``(loss, stats)``, unreduced: one entry
per token, sequence or pair. The caller weighs, sums and divides, once, over the whole batch.
Nothing here knows of models, padding, devices or ranks.

What is constant in a loss (log-probs of a reference or a sampler, advantages, labels) is refused if
it requires grad while the policy's log-probs do not: the arguments are swapped. Losses have the
dtype of their arguments. Sum log-probs in float32: in bfloat16, −500 nats are known to 2 nats.
float16 is refused, since ratios and squares overflow in it.

    supervised       tokens that should become likely
    sequence         from tokens to whole completions
    preference       pairs of completions, against a reference policy
    reference_free   pairs of completions, without one
    feedback         single completions, desirable or not
    reward           scores of completions, and of the steps of a solution
    policy           completions that the policy sampled, with their advantages
    advantage        from rewards to advantages, over the whole batch
    covariance       masks that keep the policy's entropy up
    correction       sampler and trainer disagree: weights, masks and diagnostics
    distillation     a teacher's distribution over the vocabulary
"""

# ruff: noqa: I001 - "name as name" is how a typed package exports a name; sorted, each would be a
# statement of its own
from .advantage import (
    gae as gae,
    gdpo_advantage as gdpo_advantage,
    gpg_advantage as gpg_advantage,
    group_advantage as group_advantage,
    group_stats as group_stats,
    kl_penalized_reward as kl_penalized_reward,
    max_at_k_advantage as max_at_k_advantage,
    maxrl_advantage as maxrl_advantage,
    opo_advantage as opo_advantage,
    optimal_token_advantage as optimal_token_advantage,
    optimal_value as optimal_value,
    reinforce_plus_plus as reinforce_plus_plus,
    reinforce_plus_plus_baseline as reinforce_plus_plus_baseline,
    remax_advantage as remax_advantage,
    rloo_advantage as rloo_advantage,
    weighted_reward as weighted_reward,
    whiten as whiten,
)
from .correction import (
    bound_stats as bound_stats,
    decoupled_ratio as decoupled_ratio,
    effective_sample_size as effective_sample_size,
    geometric_log_ratio as geometric_log_ratio,
    importance_mask as importance_mask,
    m2po_mask as m2po_mask,
    masked_importance as masked_importance,
    off_policy_mask as off_policy_mask,
    sampler_mismatch as sampler_mismatch,
    sequence_log_ratio as sequence_log_ratio,
    token_log_ratio as token_log_ratio,
    total_variation_mask as total_variation_mask,
    truncated_importance as truncated_importance,
    veto_mask as veto_mask,
)
from .covariance import (
    clip_cov_mask as clip_cov_mask,
    kl_cov as kl_cov,
    kl_cov_mask as kl_cov_mask,
    token_covariance as token_covariance,
)
from .distillation import (
    alpha_beta_divergence as alpha_beta_divergence,
    forward_kl as forward_kl,
    generalized_jsd as generalized_jsd,
    iw_opd as iw_opd,
    minillm as minillm,
    reverse_kl as reverse_kl,
    sampled_reverse_kl as sampled_reverse_kl,
    skew_forward_kl as skew_forward_kl,
    skew_reverse_kl as skew_reverse_kl,
    taid as taid,
    uld as uld,
    with_tail as with_tail,
)
from .feedback import (
    apo_zero_unpaired as apo_zero_unpaired,
    bco as bco,
    dro as dro,
    kto as kto,
    kto_kl as kto_kl,
)
from .policy import (
    cispo as cispo,
    clipped_surrogate as clipped_surrogate,
    corrected_kl_estimate as corrected_kl_estimate,
    dppo as dppo,
    dppo_kl as dppo_kl,
    gmpo as gmpo,
    gspo as gspo,
    gspo_token as gspo_token,
    high_entropy_mask as high_entropy_mask,
    kl_estimate as kl_estimate,
    reinforce as reinforce,
    sapo as sapo,
    topr as topr,
    value_loss as value_loss,
    vespo as vespo,
)
from .preference import (
    aot as aot,
    aot_unpaired as aot_unpaired,
    apo_down as apo_down,
    apo_zero as apo_zero,
    bco_pair as bco_pair,
    chi_po as chi_po,
    discopop as discopop,
    dpo as dpo,
    dpo_positive as dpo_positive,
    exo as exo,
    f_divergence_score as f_divergence_score,
    hinge as hinge,
    ipo as ipo,
    length_regularized_dpo as length_regularized_dpo,
    nca as nca,
    robust_dpo as robust_dpo,
    sppo_hard as sppo_hard,
    tdpo1 as tdpo1,
    tdpo2 as tdpo2,
)
from .reference_free import (
    alpha_po as alpha_po,
    cpo as cpo,
    orpo as orpo,
    simpo as simpo,
)
from .reward import (
    bradley_terry as bradley_terry,
    bradley_terry_ties as bradley_terry_ties,
    centering as centering,
    elo as elo,
    histogram_mean as histogram_mean,
    hl_gauss as hl_gauss,
    ordinal_preference as ordinal_preference,
    plackett_luce as plackett_luce,
    score_regression as score_regression,
    step_aggregate as step_aggregate,
    step_loss as step_loss,
)
from .sequence import (
    length_desensitized_sum as length_desensitized_sum,
    sequence_length as sequence_length,
    sequence_mean as sequence_mean,
    sequence_sum as sequence_sum,
    wpo_weight as wpo_weight,
)
from .supervised import (
    dft as dft,
    entropy_bonus as entropy_bonus,
    label_smoothed_nll as label_smoothed_nll,
    nll as nll,
    z_loss as z_loss,
)
from .types import (
    FlatTokens as FlatTokens,
    IntPerSequence as IntPerSequence,
    PerPair as PerPair,
    PerSequence as PerSequence,
    PerToken as PerToken,
    SequenceIds as SequenceIds,
    Stats as Stats,
)
