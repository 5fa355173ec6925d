"""Placement of points near the views that show them: Gaian's placement, assignment of patches and prefetched plans.

    groups      groups of points along the Z-order, their boxes, and which views a box may show in
    graph       the bipartite graph of groups and views
    counting    the points that views and their patches show
    metis       METIS, as pymetis packs it
    partition   groups to ranks: over machines, then over a machine's GPUs
    assign      a batch's patches to ranks
    rules       plans of coming batches, computed in advance, and the rule used if one is late

Zhao et al., "Scaling Point-based Differentiable Rendering for Large-scale Reconstruction". Sections and equations named
in these files are the paper's.
"""
