; contract minilm 1.0.0, sha256:2f515654e47a64f481dda7829877456d7bd83b66769e1d09d63488643f015f5a
; Can every clause hold at once? unsat: they contradict each other, or a slice is
; empty; (get-unsat-core) after (check-sat) names them. sat: not as far as is known.
(set-info :smt-lib-version 2.6)
(set-option :produce-unsat-cores true)
(set-option :produce-models true)
(set-logic ALL)

; --- slices: each has a request
; slice short: length <= 8
(define-fun |in slice short| ((|field length| Real)) Bool (<= |field length| 8.0))
(declare-const |field length of a request of short| Real)
(assert (! (|in slice short| |field length of a request of short|) :named |slice short has a request|))
; slice long: length > 24
(define-fun |in slice long| ((|field length| Real)) Bool (> |field length| 24.0))
(declare-const |field length of a request of long| Real)
(assert (! (|in slice long| |field length of a request of long|) :named |slice long has a request|))
; slice questions: category == "question"
(define-fun |in slice questions| ((|field category| String)) Bool (= |field category| "question"))
(declare-const |field category of a request of questions| String)
(assert (! (|in slice questions| |field category of a request of questions|) :named |slice questions has a request|))

; --- measured terms
(declare-const |largest norm_inf(drift(attn_0, x)) for x in points(all)| Real)
(declare-const |p99(hidden_l2) on all| Real)
(declare-const |p99(hidden_l2) on long| Real)
(declare-const |max(hidden_linf) on all| Real)
(declare-const |p95(embedding_l2) on all| Real)
(declare-const |min(embedding_cosine) on all| Real)
(declare-const |min(embedding_cosine) on questions| Real)
(declare-const |p80(latency) on all| Real)

; --- what holds whatever the kernels do
; least value there is
(assert (<= 0.0 |largest norm_inf(drift(attn_0, x)) for x in points(all)|))
(assert (<= 0.0 |p99(hidden_l2) on all|))
(assert (<= 0.0 |p99(hidden_l2) on long|))
(assert (<= 0.0 |max(hidden_linf) on all|))
(assert (<= 0.0 |p95(embedding_l2) on all|))
(assert (<= (- 1.0) |min(embedding_cosine) on all|))
(assert (<= (- 1.0) |min(embedding_cosine) on questions|))
(assert (<= 0.0 |p80(latency) on all|))
; greatest value there is
(assert (<= |min(embedding_cosine) on all| 1.0))
(assert (<= |min(embedding_cosine) on questions| 1.0))
; every request of questions is one of all
(assert (<= |min(embedding_cosine) on all| |min(embedding_cosine) on questions|))

; --- clauses
; N-ATTN-0, L2, hard: forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.25
(assert (! (<= |largest norm_inf(drift(attn_0, x)) for x in points(all)| (/ 1.0 4.0)) :named |N-ATTN-0 holds|))
; N-HIDDEN, L2, hard: p99(hidden_l2) <= 3
(assert (! (<= |p99(hidden_l2) on all| 3.0) :named |N-HIDDEN on all|))
(assert (! (<= |p99(hidden_l2) on long| 3.0) :named |N-HIDDEN on long|))
; N-HIDDEN-MAX, L2, hard: max(hidden_linf) <= 2
(assert (! (<= |max(hidden_linf) on all| 2.0) :named |N-HIDDEN-MAX on all|))
; N-EMBEDDING, L2, hard: p95(embedding_l2) <= 0.1
(assert (! (<= |p95(embedding_l2) on all| (/ 1.0 10.0)) :named |N-EMBEDDING on all|))
; N-COSINE, L3, hard: min(embedding_cosine) >= 0.99
(assert (! (>= |min(embedding_cosine) on all| (/ 99.0 100.0)) :named |N-COSINE on all|))
(assert (! (>= |min(embedding_cosine) on questions| (/ 99.0 100.0)) :named |N-COSINE on questions|))
; R-LATENCY, L1, hard: p80(latency) <= 2 s
(assert (! (<= |p80(latency) on all| 2.0) :named |R-LATENCY on all|))

(check-sat)
