# SPDX-License-Identifier: Apache-2.0
"""Plain NumPy in float64: each formula written once more, from the papers, to compare with."""

import math

import numpy as np


def note_self_attention(x_BTD, w_q, w_k, w_v):
    """One head: softmax(Q K^T / sqrt(H) + M) V, with M = -1e9 above the diagonal."""
    q, k, v = x_BTD @ w_q, x_BTD @ w_k, x_BTD @ w_v
    mask_TT = np.triu(np.full((x_BTD.shape[1],) * 2, -1e9), k=1)
    return softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]) + mask_TT) @ v


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(
    q_BTNH, k_BSKH, v_BSKH, seen_TS=None, bias_BNTS=0.0, scale=None, softcap=None, sinks_N=None
):
    """Grouped heads, spelled out: query head n reads key head n // (N / K).

    Scores are scaled, capped, biased, masked, and share their softmax with the head's sink.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    seen_TS = np.tri(T, S, S - T, dtype=bool) if seen_TS is None else seen_TS
    y_BTNH = np.zeros((B, T, N, v_BSKH.shape[-1]))
    for n in range(N):
        k_BSH, v_BSH = k_BSKH[:, :, n // (N // K)], v_BSKH[:, :, n // (N // K)]
        scores_BTS = q_BTNH[:, :, n] @ np.swapaxes(k_BSH, 1, 2) * (scale or 1 / math.sqrt(H))
        if softcap is not None:
            scores_BTS = softcap * np.tanh(scores_BTS / softcap)
        if np.ndim(bias_BNTS):
            scores_BTS = scores_BTS + bias_BNTS[:, n]
        scores_BTS = np.where(seen_TS, scores_BTS, -1e30)
        sink = -np.inf if sinks_N is None else sinks_N[n]
        logits = np.concatenate([scores_BTS, np.full((B, T, 1), sink)], -1)
        y_BTNH[:, :, n] = softmax(logits)[..., :-1] @ v_BSH
    return y_BTNH


def sinusoids(position, width, theta=10_000.0):
    """PE(p, 2i) = sin(p / theta^(2i/width)), PE(p, 2i + 1) = cos of the same."""
    angles = [position / theta ** (2 * i / width) for i in range(width // 2)]
    return np.array([f(a) for a in angles for f in (math.sin, math.cos)])


def layer_norm(x, scale=1.0, bias=0.0, eps=1e-5):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return scale * (x - mean) / np.sqrt(variance + eps) + bias


def rms_norm(x, scale=1.0, eps=1e-5):
    return scale * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_sigmoid(x):
    return x / (1 + np.exp(-1.702 * x))


def silu(x):
    return x / (1 + np.exp(-x))


def gpt2(params, tokens_BT, n_heads):
    """Logits of a GPT-2 with our parameter tree; the table may be padded."""
    T = tokens_BT.shape[1]
    table_VD = params["embed"]["embedding"]
    x = table_VD[tokens_BT] + params["position"]["embedding"][:T]
    for i in range(sum(name.startswith("block_") for name in params)):
        p = params[f"block_{i}"]
        x = x + multi_head(p["attention"], layer_norm(x, **p["attention_norm"]), n_heads)
        x = x + mlp(p["ffn"], layer_norm(x, **p["ffn_norm"]))
    return layer_norm(x, **params["final_norm"]) @ table_VD.T


def multi_head(p, x, n_heads, **knobs):
    """Causal self-attention without positions, from the parameters of GQA."""
    q, k, v = (split(dense(p[m], x), n_heads) for m in "qkv")
    return dense(p["out"], attention(q, k, v, **knobs).reshape(*x.shape[:2], -1))


def split(x_BTW, n_heads):
    """The last axis as heads side by side."""
    return x_BTW.reshape(*x_BTW.shape[:2], n_heads, -1)


def mlp(p, x, activation=gelu_tanh):
    return dense(p["down"], activation(dense(p["up"], x)))


def dense(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)
