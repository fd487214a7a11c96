"""The rules: algebra that holds for any numbers, one line each.

Merging and splitting products trades a copy of weights for fewer, larger ops, or for tensors that can be split over
ranks by themselves; which is better depends on the placement, so the planner decides. Rules marked `tidy` hang little
on placement, and are applied first wherever they save time. Every line is proved on random numbers by
`tests/rewrite/test_proved_rules.py`, gradients included, on the models in which it finds something to do. Not here,
because it is done elsewhere: equal ops on equal values (capture shares them, and so does what rules write), a
cross-entropy over a split vocabulary (`rules/ops/expand.py` writes the softmax out where a plan splits the classes, and
`nll_at` reads the targets of a rank's own classes).
"""

from __future__ import annotations

from laminar.rewrite.apply import Rewrite

MERGE = (
    Rewrite("merge-products", "mm(X, W*) => part(mm(X, cat(W*, 1)), 1)",
            "Products of one value with several weights (query, key and value; gate and up) read it once.", "merge"),
    Rewrite("merge-biased-products", "addmm(B*, X, W*) => part(addmm(cat(B*, 0), X, cat(W*, 1)), 1)",
            "The same for layers with a bias.", "merge"),
    Rewrite("merge-gradient-products", "mm(A*, X) => part(mm(cat(A*, 0), X), 0)",
            "Gradients of weights that read one value are one product with the gradients side by side.", "merge"),
    Rewrite("merge-batched-products", "bmm(X, W*) => part(bmm(X, cat(W*, 2)), 2)",
            "Batches of products that share their left side.", "merge"),
    Rewrite("merge-batched-products-left", "bmm(A*, X) => part(bmm(cat(A*, 1), X), 1)",
            "Batches of products that share their right side.", "merge"),
    Rewrite("sum-as-product", "sum(mm(A*, B*)) => mm(cat(A*, 1), cat(B*, 0))",
            "A sum of products (the gradient of what several layers read) is a product over a longer inner dim.",
            "merge"),
    Rewrite("batched-sum-as-product", "sum(bmm(A*, B*)) => bmm(cat(A*, 2), cat(B*, 1))",
            "The same for batches of products.", "merge"),
)  # fmt: skip
"""Several ops as one."""

SPLIT = (
    Rewrite("split-product", "part(mm(X, W), 1) => mm(X, part(W, 1))",
            "A packed projection taken apart: each part can be split over ranks by itself, without blocks.", "split"),
    Rewrite("split-biased-product", "part(addmm(B, X, W), 1) => addmm(part(B, 0), X, part(W, 1))",
            "The same for a layer with a bias.", "split"),
    Rewrite("split-gradient-product", "mm(t(cat(G*, 1)), X) => cat(mm(t(G*), X), 0)",
            "The gradient of a packed weight, part by part.", "split"),
    Rewrite("split-gradient-product-right", "mm(X, cat(G*, 1)) => cat(mm(X, G*), 1)",
            "The same for a weight that is stored the other way round.", "split"),
    Rewrite("split-inner", "mm(cat(A*, 1), B) => sum(mm(A*, part(B, 0)))",
            "A product over packed parts is a sum of products: the gradient of what a packed projection reads.",
            "split"),
    Rewrite("split-bias-gradient", "rowsum(cat(G*, 1)) => cat(rowsum(G*), 0)",
            "The gradient of a packed bias, part by part.", "split"),
)  # fmt: skip
"""One op as several: the way back."""

PRODUCT_RULES = (
    Rewrite("factor-right", "sum(mm(A*, X)) => mm(sum(A*), X)",
            "Terms that share a factor are added before the product.", tidy=True),
    Rewrite("factor-left", "sum(mm(X, B*)) => mm(X, sum(B*))", "The same from the other side.", tidy=True),
    Rewrite("reassociate-right", "mm(mm(A, B), C) => mm(A, mm(B, C))",
            "Three factors may be multiplied in either order; the cheaper one depends on their sizes.", shared=True),
    Rewrite("reassociate-left", "mm(A, mm(B, C)) => mm(mm(A, B), C)", "The same, the other way round.", shared=True),
    Rewrite("scale-behind-product", "mm(scale(A, s), B) => scale(mm(A, B), s)",
            "A number is multiplied where there are fewer elements: behind the product,", shared=True),
    Rewrite("scale-behind-product-right", "mm(A, scale(B, s)) => scale(mm(A, B), s)", "behind the product,",
            shared=True),
    Rewrite("scale-before-product", "vscale(mm(A, B), s) => mm(scale(A, s), B)", "on its left side,", tidy=True),
    Rewrite("scale-before-product-right", "vscale(mm(A, B), s) => mm(A, scale(B, s))", "or on its right side.",
            tidy=True),
    Rewrite("scale-behind-batched", "bmm(scale(A, s), B) => scale(bmm(A, B), s)",
            "The same for batches of products.", shared=True),
    Rewrite("scale-behind-batched-right", "bmm(A, scale(B, s)) => scale(bmm(A, B), s)", "The same.", shared=True),
    Rewrite("scale-before-batched", "vscale(bmm(A, B), s) => bmm(scale(A, s), B)", "The same.", tidy=True),
    Rewrite("scale-before-batched-right", "vscale(bmm(A, B), s) => bmm(A, scale(B, s))", "The same.", tidy=True),
)  # fmt: skip
"""Sums and products in another order."""

MOVES = (
    Rewrite("power-of-one", "power(A, 1) => A", "What the gradient of a square leaves behind.", tidy=True, exact=True),
    Rewrite("scale-of-one", "scale(A, 1) => A", "A multiplication by one.", tidy=True, exact=True),
    Rewrite("join-scales", "scale(scale(A, r), s) => scale(A, times(r, s))", "Two numbers are one.", tidy=True),
    Rewrite("join-turns", "turn(turn(A, p), q) => turn(A, then(p, q))",
            "Two reorderings of dims are one, or none.", tidy=True, exact=True),
    Rewrite("meet-turns", "turn(each(turn(A, p), f), q) => each(turn(A, then(p, q)), f)",
            "Reorderings on both sides of an elementwise op meet.", tidy=True, exact=True),
    Rewrite("turn-of-product", "t(mm(t(A), B)) => mm(t(B), A)", "A product that is turned afterwards is made turned.",
            tidy=True),
    Rewrite("turn-of-product-right", "t(mm(A, t(B))) => mm(B, t(A))", "The same with the other side turned.",
            tidy=True),
    Rewrite("turned-factors", "mm(t(A), t(B)) => t(mm(B, A))", "Two turned factors are a turned product."),
    Rewrite("turn-of-batched", "bt(bmm(bt(A), B)) => bmm(bt(B), A)", "The same for batches of products.", tidy=True),
    Rewrite("turn-of-batched-right", "bt(bmm(A, bt(B))) => bmm(B, bt(A))", "The same.", tidy=True),
    Rewrite("turned-batched-factors", "bmm(bt(A), bt(B)) => bt(bmm(B, A))", "The same."),
    Rewrite("each-before-expand", "each(expand(A, n), f) => expand(each(A, f), n)",
            "What is done to every copy alike is done before copying.", tidy=True, exact=True),
    Rewrite("mul-broadcasts", "mul(expand(A, n), B) => mul(A, B)", "A product stretches its factors by itself.",
            tidy=True, exact=True),
    Rewrite("add-broadcasts", "add(expand(A, n), B) => add(A, B)", "And so does a sum.", tidy=True, exact=True),
    Rewrite("each-behind-take", "take(each(A, f), m) => each(take(A, m), f)",
            "Casts and other elementwise ops come behind a look-up or a slice: on what was taken only.",
            tidy=True, exact=True),
    Rewrite("cast-of-wider", "cast(widen(A, d), e) => cast(A, e)",
            "A cast to a wider type changes nothing for the next.",
            tidy=True, exact=True),
    Rewrite("scale-behind-sum", "rsum(scale(A, s), d) => scale(rsum(A, d), s)", "A number is multiplied behind a sum.",
            tidy=True),
)  # fmt: skip
"""Turns, casts and numbers moved to where there is less to do."""

LOOKUPS = (
    Rewrite("merge-lookups", "embedding(T, I*, h) => part(embedding(T, cat(I*, -1), h), -2)",
            "Look-ups in one table are one.", "merge"),
    Rewrite("merge-lookup-gradients", "sum(embedding_grad(G*, I*, h)) => embedding_grad(cat(G*, -2), cat(I*, -1), h)",
            "And so are their gradients, which are added up.", "merge"),
)  # fmt: skip

CONVOLUTIONS = (
    Rewrite("merge-convolutions", "conv(X, W*, h) => part(conv(X, cat(W*, 0), h), 1)",
            "Branches that begin with like convolutions of one value begin with one.", "merge"),
    Rewrite("merge-biased-convolutions", "convb(X, W*, B*, h) => part(convb(X, cat(W*, 0), cat(B*, 0), h), 1)",
            "The same with biases.", "merge"),
    Rewrite("merge-convolution-gradients", "conv_dw(G*, X, W*, h) => part(conv_dw(cat(G*, 1), X, cat(W*, 0), h), 0)",
            "The gradients of their weights.", "merge"),
    Rewrite("merge-convolution-bias-gradients",
            "conv_db(G*, X, W*, h) => part(conv_db(cat(G*, 1), X, cat(W*, 0), h), 0)",
            "The gradients of their biases.", "merge"),
    Rewrite("sum-as-convolution", "sum(conv_dx(G*, X, W*, h)) => conv_dx(cat(G*, 1), X, cat(W*, 0), h)",
            "The gradient of what they read.", "merge"),
)  # fmt: skip
"""Batch norm behind a convolution stays apart: in training its scale is not known before the convolution is done."""

REWRITE_RULES: tuple[Rewrite, ...] = (*MERGE, *SPLIT, *PRODUCT_RULES, *MOVES, *LOOKUPS, *CONVOLUTIONS)
"""All of them, in the order in which they were thought worth having."""
