"""All studies of the paper, in the order in which to run them."""

import functools

from fedcog.studies.paper import analyses, comparisons, methods
from fedcog.studies.study import Study


@functools.cache
def studies() -> dict[str, Study]:
    """Return all studies by name; the most important come first."""
    ordered = (
        comparisons.main_comparison(),
        comparisons.plug_and_play(),
        comparisons.ablation(),
        comparisons.niid2_gain(),
        analyses.generation_steps(),
        analyses.generation_time(),
        analyses.training_time(),
        analyses.model_analysis(),
        analyses.local_iterations(),
        analyses.participation(),
        analyses.num_clients(),
        analyses.heterogeneity(),
        analyses.disagreement_weight(),
        analyses.distillation_weight(),
        comparisons.personalized(),
        comparisons.unprinted_settings(),
        analyses.convergence_curves(),
        analyses.data_distributions(),
        analyses.generated_images(),
        analyses.privacy(),
        comparisons.learnable_generator(),
        comparisons.flair(),
        comparisons.beyond_the_paper(),
        methods.all_methods(),
        methods.attacks(),
    )
    return {study.name: study for study in ordered}
