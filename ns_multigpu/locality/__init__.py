"""Points and pixels meet where they live: Gaian's placement of points, assignment of patches and planning ahead.

    groups      groups of points along the Z-order, their boxes, and which views a box may show in
    graph       the bipartite graph of groups and views
    counting    the points that views and their patches show
    metis       METIS, as pymetis packs it
    partition   groups to ranks: over machines, then over a machine's GPUs
    assign      a batch's patches to ranks
    rules       plans of coming batches, made ahead, and what serves where one is late

Zhao et al., "Scaling Point-based Differentiable Rendering for Large-scale Reconstruction". Sections and equations named
in these files are the paper's.
"""
