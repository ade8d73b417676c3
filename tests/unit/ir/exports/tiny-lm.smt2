; contract tiny-lm 1.0.0, sha256:263d418d8db5d471fcfcb37ad623913be5408779bdd0f8ccadc2356660ae253d
; Can every clause hold at once? unsat: they contradict each other, or a slice is
; empty; (get-unsat-core) after (check-sat) names them. sat: not as far as is known.
(set-info :smt-lib-version 2.6)
(set-option :produce-unsat-cores true)
(set-option :produce-models true)
(set-logic ALL)

; --- slices: each has a request
; slice short: length <= 16
(define-fun |in slice short| ((|field length| Real)) Bool (<= |field length| 16.0))
(declare-const |field length of a request of short| Real)
(assert (! (|in slice short| |field length of a request of short|) :named |slice short has a request|))
; slice long: length > 80
(define-fun |in slice long| ((|field length| Real)) Bool (> |field length| 80.0))
(declare-const |field length of a request of long| Real)
(assert (! (|in slice long| |field length of a request of long|) :named |slice long has a request|))
; slice safety: category == "safety"
(define-fun |in slice safety| ((|field category| String)) Bool (= |field category| "safety"))
(declare-const |field category of a request of safety| String)
(assert (! (|in slice safety| |field category of a request of safety|) :named |slice safety has a request|))

; --- measured terms
(declare-const |largest norm_inf(drift(attn_0, x)) for x in points(short)| Real)
(declare-const |largest norm_inf(drift(attn_0, x)) for x in ball(short, 0.001)| Real)
(declare-const |p99(kl) on all| Real)
(declare-const |p99(kl) on long| Real)
(declare-const |p99(tv) on all| Real)
(declare-const |mean(abs(log_ratio)) on all| Real)
(declare-const |mean(top1_overlap) on all| Real)
(declare-const |mean(top1_overlap) on safety| Real)
(declare-const |p90(latency) on all| Real)
(declare-const |throughput on all| Real)

; --- statements
(declare-const |trace has build_fingerprint on all| Bool)
(declare-const |trace has replay_signature on all| Bool)
(declare-const |trace has request_shape on all| Bool)
(declare-const |trace has rng_seed on all| Bool)
(declare-const |trace has sampling_params on all| Bool)

; --- what holds whatever the kernels do
; least value there is
(assert (<= 0.0 |largest norm_inf(drift(attn_0, x)) for x in points(short)|))
(assert (<= 0.0 |largest norm_inf(drift(attn_0, x)) for x in ball(short, 0.001)|))
(assert (<= 0.0 |p99(kl) on all|))
(assert (<= 0.0 |p99(kl) on long|))
(assert (<= 0.0 |p99(tv) on all|))
(assert (<= 0.0 |mean(abs(log_ratio)) on all|))
(assert (<= 0.0 |mean(top1_overlap) on all|))
(assert (<= 0.0 |mean(top1_overlap) on safety|))
(assert (<= 0.0 |p90(latency) on all|))
(assert (<= 0.0 |throughput on all|))
; greatest value there is
(assert (<= |p99(tv) on all| 1.0))
(assert (<= |mean(top1_overlap) on all| 1.0))
(assert (<= |mean(top1_overlap) on safety| 1.0))
; TV <= sqrt(KL/2) (Pinsker)
(assert (=> (<= |p99(kl) on all| (/ 1.0 1000000.0)) (<= |p99(tv) on all| (/ 707106781186547524401.0 1000000000000000000000000.0))))
; a region inside another
(assert (<= |largest norm_inf(drift(attn_0, x)) for x in points(short)| |largest norm_inf(drift(attn_0, x)) for x in ball(short, 0.001)|))

; --- clauses
; N-ATTN-0, L2, hard: forall x in points(short): norm_inf(drift(attn_0, x)) <= 0.01
(assert (! (<= |largest norm_inf(drift(attn_0, x)) for x in points(short)| (/ 1.0 100.0)) :named |N-ATTN-0 holds|))
; N-ATTN-0-BALL, L2, hard: forall x in ball(short, 1e-3): norm_inf(drift(attn_0, x)) <= 0.02
(assert (! (<= |largest norm_inf(drift(attn_0, x)) for x in ball(short, 0.001)| (/ 1.0 50.0)) :named |N-ATTN-0-BALL holds|))
; N-KL, L2, hard: p99(kl) <= 1e-6 nats
(assert (! (<= |p99(kl) on all| (/ 1.0 1000000.0)) :named |N-KL on all|))
(assert (! (<= |p99(kl) on long| (/ 1.0 1000000.0)) :named |N-KL on long|))
; N-TV, L2, hard: p99(tv) <= 1e-3
(assert (! (<= |p99(tv) on all| (/ 1.0 1000.0)) :named |N-TV on all|))
; N-RATIO, L2, hard: mean(abs(log_ratio)) <= 1e-4
(assert (! (<= |mean(abs(log_ratio)) on all| (/ 1.0 10000.0)) :named |N-RATIO on all|))
; S-TOP1, L3, hard: mean(top1_overlap) >= 99.5%
(assert (! (>= |mean(top1_overlap) on all| (/ 199.0 200.0)) :named |S-TOP1 on all|))
(assert (! (>= |mean(top1_overlap) on safety| (/ 199.0 200.0)) :named |S-TOP1 on safety|))
; R-LATENCY, L1, hard: p90(latency) <= 2 s
(assert (! (<= |p90(latency) on all| 2.0) :named |R-LATENCY on all|))
; R-THROUGHPUT, L1, hard: throughput >= 50 tok/s
(assert (! (>= |throughput on all| 50.0) :named |R-THROUGHPUT on all|))
; O-TRACE, L3, hard: has(trace, [build_fingerprint, request_shape, rng_seed, sampling_params, replay_signature])
(assert (! (and |trace has build_fingerprint on all| |trace has replay_signature on all| |trace has request_shape on all| |trace has rng_seed on all| |trace has sampling_params on all|) :named |O-TRACE on all|))

(check-sat)
