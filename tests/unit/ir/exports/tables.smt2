; contract corpus 1.0.0, sha256:b4c9a36ff0f29bb88627ec67d9d083c662a5cc6729ce9de776689fe049e58c3e
; Can every clause hold at once? unsat: they contradict each other, or a slice is
; empty; (get-unsat-core) after (check-sat) names them. sat: not as far as is known.
(set-info :smt-lib-version 2.6)
(set-option :produce-unsat-cores true)
(set-option :produce-models true)
(set-logic ALL)

; --- slices: each has a request
; slice long: length > 128
(define-fun |in slice long| ((|field length| Real)) Bool (> |field length| 128.0))
(declare-const |field length of a request of long| Real)
(assert (! (|in slice long| |field length of a request of long|) :named |slice long has a request|))
; slice all[tau_kl: length <= 128 and category == "chat"]: length <= 128 and category == "chat"
(define-fun |in slice all[tau_kl: length <= 128 and category == "chat"]| ((|field length| Real) (|field category| String)) Bool (and (<= |field length| 128.0) (= |field category| "chat")))
(declare-const |field length of a request of all[tau_kl: length <= 128 and category == "chat"]| Real)
(declare-const |field category of a request of all[tau_kl: length <= 128 and category == "chat"]| String)
(assert (! (|in slice all[tau_kl: length <= 128 and category == "chat"]| |field length of a request of all[tau_kl: length <= 128 and category == "chat"]| |field category of a request of all[tau_kl: length <= 128 and category == "chat"]|) :named |slice all[tau_kl: length <= 128 and category == "chat"] has a request|))
; slice all[tau_kl: length <= 128]: not (length <= 128 and category == "chat") and length <= 128
(define-fun |in slice all[tau_kl: length <= 128]| ((|field length| Real) (|field category| String)) Bool (and (not (and (<= |field length| 128.0) (= |field category| "chat"))) (<= |field length| 128.0)))
(declare-const |field length of a request of all[tau_kl: length <= 128]| Real)
(declare-const |field category of a request of all[tau_kl: length <= 128]| String)
(assert (! (|in slice all[tau_kl: length <= 128]| |field length of a request of all[tau_kl: length <= 128]| |field category of a request of all[tau_kl: length <= 128]|) :named |slice all[tau_kl: length <= 128] has a request|))
; slice all[tau_kl: otherwise]: not (length <= 128 and category == "chat") and not length <= 128
(define-fun |in slice all[tau_kl: otherwise]| ((|field length| Real) (|field category| String)) Bool (and (not (and (<= |field length| 128.0) (= |field category| "chat"))) (not (<= |field length| 128.0))))
(declare-const |field length of a request of all[tau_kl: otherwise]| Real)
(declare-const |field category of a request of all[tau_kl: otherwise]| String)
(assert (! (|in slice all[tau_kl: otherwise]| |field length of a request of all[tau_kl: otherwise]| |field category of a request of all[tau_kl: otherwise]|) :named |slice all[tau_kl: otherwise] has a request|))
; slice long[tau_kl: otherwise]: length > 128 and not (length <= 128 and category == "chat") and not length <= 128
(define-fun |in slice long[tau_kl: otherwise]| ((|field length| Real) (|field category| String)) Bool (and (> |field length| 128.0) (not (and (<= |field length| 128.0) (= |field category| "chat"))) (not (<= |field length| 128.0))))
(declare-const |field length of a request of long[tau_kl: otherwise]| Real)
(declare-const |field category of a request of long[tau_kl: otherwise]| String)
(assert (! (|in slice long[tau_kl: otherwise]| |field length of a request of long[tau_kl: otherwise]| |field category of a request of long[tau_kl: otherwise]|) :named |slice long[tau_kl: otherwise] has a request|))
; slice all[latency_by_length: length <= 128]: length <= 128
(define-fun |in slice all[latency_by_length: length <= 128]| ((|field length| Real)) Bool (<= |field length| 128.0))
(declare-const |field length of a request of all[latency_by_length: length <= 128]| Real)
(assert (! (|in slice all[latency_by_length: length <= 128]| |field length of a request of all[latency_by_length: length <= 128]|) :named |slice all[latency_by_length: length <= 128] has a request|))
; slice all[latency_by_length: length >= 129]: not length <= 128 and length >= 129
(define-fun |in slice all[latency_by_length: length >= 129]| ((|field length| Real)) Bool (and (not (<= |field length| 128.0)) (>= |field length| 129.0)))
(declare-const |field length of a request of all[latency_by_length: length >= 129]| Real)
(assert (! (|in slice all[latency_by_length: length >= 129]| |field length of a request of all[latency_by_length: length >= 129]|) :named |slice all[latency_by_length: length >= 129] has a request|))
; slice all[overlap: streamed == true]: streamed == true
(define-fun |in slice all[overlap: streamed == true]| ((|field streamed| Bool)) Bool (= |field streamed| true))
(declare-const |field streamed of a request of all[overlap: streamed == true]| Bool)
(assert (! (|in slice all[overlap: streamed == true]| |field streamed of a request of all[overlap: streamed == true]|) :named |slice all[overlap: streamed == true] has a request|))
; slice all[overlap: streamed == false]: not streamed == true and streamed == false
(define-fun |in slice all[overlap: streamed == false]| ((|field streamed| Bool)) Bool (and (not (= |field streamed| true)) (= |field streamed| false)))
(declare-const |field streamed of a request of all[overlap: streamed == false]| Bool)
(assert (! (|in slice all[overlap: streamed == false]| |field streamed of a request of all[overlap: streamed == false]|) :named |slice all[overlap: streamed == false] has a request|))
; slice all[spread: tier == "free" or tier == "trial"]: tier == "free" or tier == "trial"
(define-fun |in slice all[spread: tier == "free" or tier == "trial"]| ((|field tier| String)) Bool (or (= |field tier| "free") (= |field tier| "trial")))
(declare-const |field tier of a request of all[spread: tier == "free" or tier == "trial"]| String)
(assert (! (|in slice all[spread: tier == "free" or tier == "trial"]| |field tier of a request of all[spread: tier == "free" or tier == "trial"]|) :named |slice all[spread: tier == "free" or tier == "trial"] has a request|))
; slice all[spread: otherwise]: not (tier == "free" or tier == "trial")
(define-fun |in slice all[spread: otherwise]| ((|field tier| String)) Bool (not (or (= |field tier| "free") (= |field tier| "trial"))))
(declare-const |field tier of a request of all[spread: otherwise]| String)
(assert (! (|in slice all[spread: otherwise]| |field tier of a request of all[spread: otherwise]|) :named |slice all[spread: otherwise] has a request|))
; slice long[spread: tier == "free" or tier == "trial"]: length > 128 and (tier == "free" or tier == "trial")
(define-fun |in slice long[spread: tier == "free" or tier == "trial"]| ((|field length| Real) (|field tier| String)) Bool (and (> |field length| 128.0) (or (= |field tier| "free") (= |field tier| "trial"))))
(declare-const |field length of a request of long[spread: tier == "free" or tier == "trial"]| Real)
(declare-const |field tier of a request of long[spread: tier == "free" or tier == "trial"]| String)
(assert (! (|in slice long[spread: tier == "free" or tier == "trial"]| |field length of a request of long[spread: tier == "free" or tier == "trial"]| |field tier of a request of long[spread: tier == "free" or tier == "trial"]|) :named |slice long[spread: tier == "free" or tier == "trial"] has a request|))
; slice long[spread: otherwise]: length > 128 and not (tier == "free" or tier == "trial")
(define-fun |in slice long[spread: otherwise]| ((|field length| Real) (|field tier| String)) Bool (and (> |field length| 128.0) (not (or (= |field tier| "free") (= |field tier| "trial")))))
(declare-const |field length of a request of long[spread: otherwise]| Real)
(declare-const |field tier of a request of long[spread: otherwise]| String)
(assert (! (|in slice long[spread: otherwise]| |field length of a request of long[spread: otherwise]| |field tier of a request of long[spread: otherwise]|) :named |slice long[spread: otherwise] has a request|))

; --- measured terms
(declare-const |p99(kl) on all[tau_kl: length <= 128 and category == "chat"]| Real)
(declare-const |p99(kl) on all[tau_kl: length <= 128]| Real)
(declare-const |p99(kl) on all[tau_kl: otherwise]| Real)
(declare-const |p99(kl) on long[tau_kl: otherwise]| Real)
(declare-const |max(kl) on all[tau_kl: length <= 128 and category == "chat"]| Real)
(declare-const |max(kl) on all[tau_kl: length <= 128]| Real)
(declare-const |max(kl) on all[tau_kl: otherwise]| Real)
(declare-const |mean(top5_overlap) on all[overlap: streamed == true]| Real)
(declare-const |mean(top5_overlap) on all[overlap: streamed == false]| Real)
(declare-const |mean(logit_l2) on all[spread: tier == "free" or tier == "trial"]| Real)
(declare-const |max(logit_l2) on all[spread: tier == "free" or tier == "trial"]| Real)
(declare-const |mean(logit_l2) on all[spread: otherwise]| Real)
(declare-const |max(logit_l2) on all[spread: otherwise]| Real)
(declare-const |largest norm_2(measured_drift(attn_0, x)) for x in points(long[spread: tier == "free" or tier == "trial"])| Real)
(declare-const |largest norm_2(measured_drift(attn_0, x)) for x in points(long[spread: otherwise])| Real)
(declare-const |p95(latency) on all[latency_by_length: length <= 128], one window| Real)
(declare-const |p95(latency) on all[latency_by_length: length >= 129], one window| Real)

; --- what holds whatever the kernels do
; least value there is
(assert (<= 0.0 |largest norm_2(measured_drift(attn_0, x)) for x in points(long[spread: tier == "free" or tier == "trial"])|))
(assert (<= 0.0 |largest norm_2(measured_drift(attn_0, x)) for x in points(long[spread: otherwise])|))
(assert (<= 0.0 |p99(kl) on all[tau_kl: length <= 128 and category == "chat"]|))
(assert (<= 0.0 |p99(kl) on all[tau_kl: length <= 128]|))
(assert (<= 0.0 |p99(kl) on all[tau_kl: otherwise]|))
(assert (<= 0.0 |p99(kl) on long[tau_kl: otherwise]|))
(assert (<= 0.0 |max(kl) on all[tau_kl: length <= 128 and category == "chat"]|))
(assert (<= 0.0 |max(kl) on all[tau_kl: length <= 128]|))
(assert (<= 0.0 |max(kl) on all[tau_kl: otherwise]|))
(assert (<= 0.0 |mean(top5_overlap) on all[overlap: streamed == true]|))
(assert (<= 0.0 |mean(top5_overlap) on all[overlap: streamed == false]|))
(assert (<= 0.0 |mean(logit_l2) on all[spread: tier == "free" or tier == "trial"]|))
(assert (<= 0.0 |max(logit_l2) on all[spread: tier == "free" or tier == "trial"]|))
(assert (<= 0.0 |mean(logit_l2) on all[spread: otherwise]|))
(assert (<= 0.0 |max(logit_l2) on all[spread: otherwise]|))
(assert (<= 0.0 |p95(latency) on all[latency_by_length: length <= 128], one window|))
(assert (<= 0.0 |p95(latency) on all[latency_by_length: length >= 129], one window|))
; greatest value there is
(assert (<= |mean(top5_overlap) on all[overlap: streamed == true]| 1.0))
(assert (<= |mean(top5_overlap) on all[overlap: streamed == false]| 1.0))
; no percentile is above the maximum
(assert (<= |p99(kl) on all[tau_kl: length <= 128 and category == "chat"]| |max(kl) on all[tau_kl: length <= 128 and category == "chat"]|))
(assert (<= |p99(kl) on all[tau_kl: length <= 128]| |max(kl) on all[tau_kl: length <= 128]|))
(assert (<= |p99(kl) on all[tau_kl: otherwise]| |max(kl) on all[tau_kl: otherwise]|))
; no percentile is above the maximum; every request of long[tau_kl: otherwise] is one of all[tau_kl: otherwise]
(assert (<= |p99(kl) on long[tau_kl: otherwise]| |max(kl) on all[tau_kl: otherwise]|))
; a mean is no more than the maximum
(assert (<= |mean(logit_l2) on all[spread: tier == "free" or tier == "trial"]| |max(logit_l2) on all[spread: tier == "free" or tier == "trial"]|))
(assert (<= |mean(logit_l2) on all[spread: otherwise]| |max(logit_l2) on all[spread: otherwise]|))
; a mean is at an end of the range only where every value is
(assert (=> (<= |mean(logit_l2) on all[spread: tier == "free" or tier == "trial"]| 0.0) (<= |max(logit_l2) on all[spread: tier == "free" or tier == "trial"]| 0.0)))
(assert (=> (<= |mean(logit_l2) on all[spread: otherwise]| 0.0) (<= |max(logit_l2) on all[spread: otherwise]| 0.0)))

; --- clauses
; N-KL, L2, hard: p99(kl) <= table(tau_kl)
(assert (! (<= |p99(kl) on all[tau_kl: length <= 128 and category == "chat"]| (/ 1.0 100.0)) :named |N-KL on all[tau_kl: length <= 128 and category == "chat"]|))
(assert (! (<= |p99(kl) on all[tau_kl: length <= 128]| (/ 1.0 50.0)) :named |N-KL on all[tau_kl: length <= 128]|))
(assert (! (<= |p99(kl) on all[tau_kl: otherwise]| (/ 1.0 20.0)) :named |N-KL on all[tau_kl: otherwise]|))
(assert (! (<= |p99(kl) on long[tau_kl: otherwise]| (/ 1.0 20.0)) :named |N-KL on long[tau_kl: otherwise]|))
; N-PROVED, L2, hard: table(tau_kl) >= max(kl)
(assert (! (<= |max(kl) on all[tau_kl: length <= 128 and category == "chat"]| (/ 1.0 100.0)) :named |N-PROVED on all[tau_kl: length <= 128 and category == "chat"]|))
(assert (! (<= |max(kl) on all[tau_kl: length <= 128]| (/ 1.0 50.0)) :named |N-PROVED on all[tau_kl: length <= 128]|))
(assert (! (<= |max(kl) on all[tau_kl: otherwise]| (/ 1.0 20.0)) :named |N-PROVED on all[tau_kl: otherwise]|))
; S-TOP5, L2, hard: top5_overlap table(overlap)
(assert (! (>= |mean(top5_overlap) on all[overlap: streamed == true]| (/ 97.0 100.0)) :named |S-TOP5 on all[overlap: streamed == true]|))
(assert (! (>= |mean(top5_overlap) on all[overlap: streamed == false]| (/ 199.0 200.0)) :named |S-TOP5 on all[overlap: streamed == false]|))
; N-BOTH, L1, hard: mean(logit_l2) <= table(spread) and max(logit_l2) <= 40
(assert (! (and (<= |mean(logit_l2) on all[spread: tier == "free" or tier == "trial"]| 3.0) (<= |max(logit_l2) on all[spread: tier == "free" or tier == "trial"]| 40.0)) :named |N-BOTH on all[spread: tier == "free" or tier == "trial"]|))
(assert (! (and (<= |mean(logit_l2) on all[spread: otherwise]| (/ 5.0 2.0)) (<= |max(logit_l2) on all[spread: otherwise]| 40.0)) :named |N-BOTH on all[spread: otherwise]|))
; N-SEEN, L1, hard: forall x in points(long): norm_2(measured_drift(attn_0, x)) <= table(spread)
(assert (! (<= |largest norm_2(measured_drift(attn_0, x)) for x in points(long[spread: tier == "free" or tier == "trial"])| 3.0) :named |N-SEEN holds|))
(assert (! (<= |largest norm_2(measured_drift(attn_0, x)) for x in points(long[spread: otherwise])| (/ 5.0 2.0)) :named |N-SEEN holds (2)|))
; R-LATENCY, L1, budget 5% of windows: p95(latency) < table(latency_by_length)
(assert (! (< |p95(latency) on all[latency_by_length: length <= 128], one window| (/ 1.0 50.0)) :named |R-LATENCY on all[latency_by_length: length <= 128]|))
(assert (! (< |p95(latency) on all[latency_by_length: length >= 129], one window| (/ 1.0 4.0)) :named |R-LATENCY on all[latency_by_length: length >= 129]|))

(check-sat)
