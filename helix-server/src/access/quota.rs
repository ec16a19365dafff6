//! Quotas on this node: what each principal has moved, and how long it has to wait.
//!
//! Each limit is a token bucket of one second. A message is admitted while its bucket is not
//! overdrawn, and later ones wait for what it took: the size of a response is not known before it
//! is read. A principal with several connections shares its buckets among them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::call_share::CallShare;
use crate::error::{Error, Result};
use crate::log::{AccessState, QuotaLimits};
use crate::sync;

/// Micro-units in a unit (a byte or a call). Rates are in units per second, which is the same
/// number of micro-units per microsecond.
const MICRO: i64 = 1_000_000;

/// Longest hint to wait: a quota may be raised meanwhile.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Longest time that a refused call waits for others that were refused before it.
const TURN_MAX: Duration = Duration::from_secs(1);

/// Time for which reads count as delayed after a wait. Streams over their quota check it every
/// second.
const READS_DELAYED_FOR: Duration = Duration::from_secs(3);

/// Meters that are kept at least, before those that are not in use are dropped.
const METERS_KEPT: usize = 1_024;

/// A limit of a quota. The name is a value of the metric's `limit` label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaKind {
    /// Bytes of requests.
    BytesIn,
    /// Bytes of records that are read.
    BytesOut,
    Requests,
    Connections,
}

impl QuotaKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BytesIn => "bytes_in",
            Self::BytesOut => "bytes_out",
            Self::Requests => "requests",
            Self::Connections => "connections",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::BytesIn => "bytes of requests per second",
            Self::BytesOut => "bytes of records read per second",
            Self::Requests => "requests per second",
            Self::Connections => "connections",
        }
    }
}

/// Token bucket that may be overdrawn. It is full after one second.
#[derive(Debug)]
struct TokenBucket {
    /// Units per second; 0 is no limit.
    per_second: u64,
    /// Micro-units; negative while the bucket is overdrawn.
    balance: i64,
    filled_at: Instant,
    /// Moving mean of what a message takes, in micro-units: what the next one is expected to take.
    mean: i64,
    /// When the calls that were refused until now will have had their turns.
    turns_until: Instant,
}

impl TokenBucket {
    fn new(now: Instant) -> Self {
        Self { per_second: 0, balance: 0, filled_at: now, mean: 0, turns_until: now }
    }

    /// Changes the limit. A new limit begins with a full bucket; a debt remains.
    fn set(&mut self, per_second: u64, now: Instant) {
        if per_second == self.per_second {
            return;
        }
        self.fill(now);
        let is_new = self.per_second == 0;
        self.per_second = per_second;
        self.balance = if is_new { self.capacity() } else { self.balance.min(self.capacity()) };
    }

    fn capacity(&self) -> i64 {
        i64::try_from(self.per_second).unwrap_or(i64::MAX).saturating_mul(MICRO)
    }

    fn fill(&mut self, now: Instant) {
        let elapsed_us = now.saturating_duration_since(self.filled_at).as_micros();
        let elapsed_us = i64::try_from(elapsed_us).unwrap_or(i64::MAX);
        let rate = i64::try_from(self.per_second).unwrap_or(i64::MAX);
        let filled = self.balance.saturating_add(elapsed_us.saturating_mul(rate));
        self.balance = filled.min(self.capacity());
        // Keeps the fraction of a microsecond.
        let elapsed_us = u64::try_from(elapsed_us).unwrap_or_default();
        self.filled_at += Duration::from_micros(elapsed_us);
    }

    /// Takes units, more than there are if need be.
    fn take(&mut self, units: u64, now: Instant) {
        if self.per_second == 0 {
            return;
        }
        self.fill(now);
        let units = i64::try_from(units).unwrap_or(i64::MAX).saturating_mul(MICRO);
        self.balance = self.balance.saturating_sub(units);
        self.mean = self.mean - self.mean / 8 + units / 8;
    }

    /// Returns how long the bucket stays overdrawn; `None` if it is not.
    fn wait(&mut self, now: Instant) -> Option<Duration> {
        if self.per_second == 0 {
            return None;
        }
        self.fill(now);
        if self.balance >= 0 {
            return None;
        }
        let wait_us = self.balance.unsigned_abs().div_ceil(self.per_second);
        Some(Duration::from_micros(wait_us).min(WAIT_MAX))
    }

    /// Returns how long a refused call waits for its turn; `None` if the bucket is not overdrawn.
    ///
    /// Each refused call gets a turn of its own. If all waited until the bucket is no longer
    /// overdrawn, all would come back at once, and all but one would be refused again.
    fn next_turn(&mut self, now: Instant) -> Option<Duration> {
        let free_at = now + self.wait(now)?;
        let turn = self.turns_until.clamp(free_at, free_at + TURN_MAX);
        let turn_us = self.mean.unsigned_abs() / self.per_second;
        self.turns_until = turn + Duration::from_micros(turn_us).min(TURN_MAX);
        Some(turn - now)
    }
}

#[derive(Debug)]
struct Buckets {
    bytes_in: TokenBucket,
    bytes_out: TokenBucket,
    requests: TokenBucket,
    /// Time of the last read that had to wait.
    reads_delayed_at: Option<Instant>,
}

impl Buckets {
    fn of(&mut self, kind: QuotaKind) -> Option<&mut TokenBucket> {
        match kind {
            QuotaKind::BytesIn => Some(&mut self.bytes_in),
            QuotaKind::BytesOut => Some(&mut self.bytes_out),
            QuotaKind::Requests => Some(&mut self.requests),
            QuotaKind::Connections => None,
        }
    }

    /// Returns how long a call or stream has to wait; `None` if it may go on.
    fn delay(&mut self, kind: QuotaKind, now: Instant) -> Option<Duration> {
        let wait = self.of(kind)?.wait(now)?;
        self.note_delay(kind, now);
        Some(wait)
    }

    /// Returns how long a refused call waits for its turn; `None` if it is admitted.
    fn next_turn(&mut self, kind: QuotaKind, now: Instant) -> Option<Duration> {
        let wait = self.of(kind)?.next_turn(now)?;
        self.note_delay(kind, now);
        Some(wait)
    }

    fn note_delay(&mut self, kind: QuotaKind, now: Instant) {
        if kind == QuotaKind::BytesOut {
            self.reads_delayed_at = Some(now);
        }
    }
}

/// Bytes, calls and connections of one principal on this node, and its limits.
#[derive(Debug)]
pub struct QuotaMeter {
    principal: Arc<str>,
    /// False if the principal has no quota: the usual case takes no lock.
    has_rates: AtomicBool,
    connections_max: AtomicU32,
    connection_count: AtomicU32,
    throttled: AtomicU64,
    buckets: Mutex<Buckets>,
    call_share: Arc<CallShare>,
}

impl QuotaMeter {
    fn new(principal: &str) -> Self {
        let now = Instant::now();
        let bucket = || TokenBucket::new(now);
        let buckets = Buckets {
            bytes_in: bucket(),
            bytes_out: bucket(),
            requests: bucket(),
            reads_delayed_at: None,
        };
        Self {
            principal: principal.into(),
            has_rates: AtomicBool::new(false),
            connections_max: AtomicU32::new(0),
            connection_count: AtomicU32::new(0),
            throttled: AtomicU64::new(0),
            buckets: Mutex::new(buckets),
            call_share: CallShare::of_principal(),
        }
    }

    /// Returns the principal's share of the node's open calls, which needs no quota.
    pub fn call_share(&self) -> &Arc<CallShare> {
        &self.call_share
    }

    fn set_limits(&self, limits: Option<&QuotaLimits>) {
        let unlimited = QuotaLimits::default();
        let limits = limits.unwrap_or(&unlimited);
        let now = Instant::now();
        let mut buckets = sync::lock(&self.buckets);
        buckets.bytes_in.set(limits.bytes_in_per_second, now);
        buckets.bytes_out.set(limits.bytes_out_per_second, now);
        buckets.requests.set(limits.requests_per_second, now);
        let QuotaLimits { bytes_in_per_second, bytes_out_per_second, .. } = limits;
        let rates = bytes_in_per_second | bytes_out_per_second | limits.requests_per_second;
        self.has_rates.store(rates != 0, Ordering::Relaxed);
        self.connections_max.store(limits.connections, Ordering::Relaxed);
    }

    /// Takes bytes that were moved, or a call.
    pub fn take(&self, kind: QuotaKind, units: u64) {
        if self.has_rates.load(Ordering::Relaxed)
            && let Some(bucket) = sync::lock(&self.buckets).of(kind)
        {
            bucket.take(units, Instant::now());
        }
    }

    /// Returns how long a stream has to wait; `None` if it may go on.
    pub fn wait(&self, kind: QuotaKind) -> Option<Duration> {
        if !self.has_rates.load(Ordering::Relaxed) {
            return None;
        }
        sync::lock(&self.buckets).delay(kind, Instant::now())
    }

    pub fn principal(&self) -> &Arc<str> {
        &self.principal
    }

    /// Returns whether the quota has delayed reads in the last seconds, and still limits them.
    pub fn delays_reads(&self) -> bool {
        if !self.has_rates.load(Ordering::Relaxed) {
            return false;
        }
        let buckets = sync::lock(&self.buckets);
        buckets.bytes_out.per_second != 0
            && buckets.reads_delayed_at.is_some_and(|at| at.elapsed() < READS_DELAYED_FOR)
    }

    /// Admits a call that moves bytes of this kind, if of any, and counts it.
    ///
    /// # Errors
    /// [`Error::OverQuota`] while a bucket is overdrawn.
    pub fn admit_call(&self, moves: Option<QuotaKind>) -> Result<()> {
        if !self.has_rates.load(Ordering::Relaxed) {
            return Ok(());
        }
        let now = Instant::now();
        let mut buckets = sync::lock(&self.buckets);
        let kinds = [Some(QuotaKind::Requests), moves];
        for kind in kinds.into_iter().flatten() {
            if let Some(wait) = buckets.next_turn(kind, now) {
                let limit = buckets.of(kind).map_or(0, |bucket| bucket.per_second);
                return Err(self.over_quota(kind, limit, wait));
            }
        }
        buckets.requests.take(1, now);
        Ok(())
    }

    /// Counts a call that is admitted in any case. Such calls overdraw the bucket by at most the
    /// calls of one second, so that they do not shut out all others.
    pub fn count_call(&self) {
        if self.has_rates.load(Ordering::Relaxed) {
            let requests = &mut sync::lock(&self.buckets).requests;
            requests.take(1, Instant::now());
            requests.balance = requests.balance.max(-requests.capacity());
        }
    }

    /// Admits a message while the bucket is not overdrawn.
    ///
    /// # Errors
    /// [`Error::OverQuota`] with the time until then.
    pub fn admit(&self, kind: QuotaKind) -> Result<()> {
        if !self.has_rates.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut buckets = sync::lock(&self.buckets);
        match buckets.delay(kind, Instant::now()) {
            Some(wait) => {
                let limit = buckets.of(kind).map_or(0, |bucket| bucket.per_second);
                Err(self.over_quota(kind, limit, wait))
            }
            None => Ok(()),
        }
    }

    /// Counts a connection of the principal until the slot is dropped.
    ///
    /// # Errors
    /// [`Error::OverQuota`] if the maximum is open.
    pub fn connect(self: &Arc<Self>) -> Result<ConnectionSlot> {
        let max = self.connections_max.load(Ordering::Relaxed);
        let count = self.connection_count.fetch_add(1, Ordering::Relaxed);
        let slot = ConnectionSlot(self.clone());
        if max != 0 && count >= max {
            return Err(self.over_quota(QuotaKind::Connections, max.into(), WAIT_MAX));
        }
        Ok(slot)
    }

    fn over_quota(&self, kind: QuotaKind, limit: u64, wait: Duration) -> Error {
        self.throttled.fetch_add(1, Ordering::Relaxed);
        Error::OverQuota {
            principal: self.principal.to_string(),
            limit,
            unit: kind.unit(),
            kind: kind.as_str(),
            // At least 1, so that a client does not retry at once.
            retry_after_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(1),
        }
    }

    /// Counts a stream that is delayed.
    pub fn on_delayed(&self) {
        self.throttled.fetch_add(1, Ordering::Relaxed);
    }

    pub fn connection_count(&self) -> u32 {
        self.connection_count.load(Ordering::Relaxed)
    }

    /// Returns the calls that were refused and the streams that were delayed.
    pub fn throttled_count(&self) -> u64 {
        self.throttled.load(Ordering::Relaxed)
    }
}

/// A counted connection of a principal.
#[derive(Debug)]
pub struct ConnectionSlot(Arc<QuotaMeter>);

impl ConnectionSlot {
    pub fn is_of(&self, meter: &Arc<QuotaMeter>) -> bool {
        Arc::ptr_eq(&self.0, meter)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.connection_count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The meters of a node, by principal.
#[derive(Debug, Default)]
pub(crate) struct QuotaMeters {
    meters: Mutex<HashMap<Box<str>, Arc<QuotaMeter>>>,
}

impl QuotaMeters {
    /// Returns the meter of a principal, with the newest limits. `access` is called under the lock,
    /// so that limits never go back to those of an earlier state.
    pub(crate) fn meter(
        &self,
        principal: &str,
        access: impl FnOnce() -> Arc<AccessState>,
    ) -> Arc<QuotaMeter> {
        let mut meters = sync::lock(&self.meters);
        let access = access();
        let limits = access.quota_of(principal).map(AsRef::as_ref);
        if let Some(meter) = meters.get(principal) {
            meter.set_limits(limits);
            return meter.clone();
        }
        if meters.len() >= METERS_KEPT && meters.len() == meters.capacity() {
            // A principal that comes back later than this begins with full buckets.
            meters.retain(|_, meter| Arc::strong_count(meter) > 1 || meter.is_overdrawn());
        }
        let meter = Arc::new(QuotaMeter::new(principal));
        meter.set_limits(limits);
        meters.insert(principal.into(), meter.clone());
        meter
    }

    /// Returns the meter of a principal that has used this node.
    pub(crate) fn known(&self, principal: &str) -> Option<Arc<QuotaMeter>> {
        sync::lock(&self.meters).get(principal).cloned()
    }
}

impl QuotaMeter {
    fn is_overdrawn(&self) -> bool {
        let now = Instant::now();
        let mut buckets = sync::lock(&self.buckets);
        let kinds = [QuotaKind::BytesIn, QuotaKind::BytesOut, QuotaKind::Requests];
        kinds.into_iter().any(|kind| buckets.of(kind).is_some_and(|it| it.wait(now).is_some()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::AccessCommand;

    fn limits(bytes_in: u64, requests: u64, connections: u32) -> QuotaLimits {
        QuotaLimits {
            principal: "billing".to_owned(),
            bytes_in_per_second: bytes_in,
            bytes_out_per_second: 0,
            requests_per_second: requests,
            connections,
        }
    }

    fn meter(limits: QuotaLimits) -> Arc<QuotaMeter> {
        QuotaMeters::default().meter("billing", || with_quota(limits))
    }

    fn with_quota(limits: QuotaLimits) -> Arc<AccessState> {
        let mut access = AccessState::default();
        access.apply(&AccessCommand::SetQuota(limits)).unwrap();
        Arc::new(access)
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_request_is_admitted_and_later_ones_wait_for_it() {
        let meter = meter(limits(1 << 20, 0, 0));
        meter.admit_call(Some(QuotaKind::BytesIn)).unwrap();
        meter.take(QuotaKind::BytesIn, 3 << 20);
        let error = meter.admit_call(Some(QuotaKind::BytesIn)).unwrap_err();
        let Error::OverQuota { limit, retry_after_ms, .. } = error else { panic!("{error}") };
        assert_eq!((limit, retry_after_ms), (1 << 20, 2_000), "one second is in the bucket");
        meter.admit_call(Some(QuotaKind::BytesOut)).unwrap();
        tokio::time::advance(Duration::from_millis(1_999)).await;
        assert!(meter.admit_call(Some(QuotaKind::BytesIn)).is_err());
        tokio::time::advance(Duration::from_millis(1)).await;
        meter.admit_call(Some(QuotaKind::BytesIn)).unwrap();
        assert_eq!(meter.throttled_count(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn each_refused_call_gets_a_turn_of_its_own() {
        let meter = meter(limits(1 << 20, 0, 0));
        let refused = || match meter.admit_call(Some(QuotaKind::BytesIn)) {
            Err(Error::OverQuota { retry_after_ms, .. }) => retry_after_ms,
            other => panic!("{other:?}"),
        };
        // Each message takes an eighth of a second; one second is in the bucket.
        for _ in 0..64 {
            meter.take(QuotaKind::BytesIn, 1 << 17);
        }
        assert_eq!(refused(), 7_000);
        let turns = [refused(), refused(), refused()];
        let near = |it: u64, wanted: u64| it.abs_diff(wanted) <= 5;
        assert!(turns.iter().zip([7_125, 7_250, 7_375]).all(|(it, wanted)| near(*it, wanted)));
        // They end within a second, so that callers that went away delay others for a short time.
        for _ in 0..100 {
            assert!(refused() <= 8_000);
        }
        assert_eq!(refused(), 8_000);
        // A stream waits only for the bucket.
        assert_eq!(meter.wait(QuotaKind::BytesIn), Some(Duration::from_secs(7)));
        // Turns keep no caller from a bucket that is no longer overdrawn.
        tokio::time::advance(Duration::from_secs(7)).await;
        meter.admit_call(Some(QuotaKind::BytesIn)).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn reads_count_as_delayed_for_some_seconds() {
        let limits = QuotaLimits { bytes_out_per_second: 1 << 20, ..limits(1 << 20, 0, 0) };
        let meters = QuotaMeters::default();
        let meter = meters.meter("billing", || with_quota(limits.clone()));
        meter.take(QuotaKind::BytesIn, 5 << 20);
        assert!(meter.wait(QuotaKind::BytesIn).is_some());
        meter.take(QuotaKind::BytesOut, 2 << 20);
        assert!(meter.is_overdrawn() && !meter.delays_reads(), "no read had to wait");
        assert!(meter.wait(QuotaKind::BytesOut).is_some());
        assert!(meter.delays_reads());
        tokio::time::advance(READS_DELAYED_FOR).await;
        assert!(!meter.delays_reads());
        meter.take(QuotaKind::BytesOut, 9 << 20);
        meter.admit_call(Some(QuotaKind::BytesOut)).unwrap_err();
        assert!(meter.delays_reads());
        let unlimited = QuotaLimits { bytes_out_per_second: 0, ..limits };
        meters.meter("billing", || with_quota(unlimited));
        assert!(!meter.delays_reads());
    }

    #[tokio::test(start_paused = true)]
    async fn calls_keep_their_rate() {
        let meter = meter(limits(0, 10, 0));
        let mut admitted = 0;
        for _ in 0..50 {
            // The bucket holds 10 and may be overdrawn by one call.
            while meter.admit_call(None).is_ok() {
                admitted += 1;
            }
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        assert_eq!(admitted, 11 + 49);
    }

    #[tokio::test(start_paused = true)]
    async fn connections_are_counted_until_their_slots_drop() {
        let meter = meter(limits(0, 0, 2));
        let first = meter.connect().unwrap();
        let _second = meter.connect().unwrap();
        let error = meter.connect().unwrap_err();
        assert!(error.to_string().contains("2 connections"), "{error}");
        assert_eq!(meter.connection_count(), 2);
        drop(first);
        meter.connect().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_quota_keeps_the_debt_and_a_removed_one_ends_it() {
        let meters = QuotaMeters::default();
        let meter = meters.meter("billing", || with_quota(limits(1 << 20, 0, 0)));
        meter.take(QuotaKind::BytesIn, 5 << 20);
        let known = meters.meter("billing", || with_quota(limits(4 << 20, 0, 0)));
        assert!(Arc::ptr_eq(&meter, &known));
        assert_eq!(meter.wait(QuotaKind::BytesIn), Some(Duration::from_secs(1)));
        meters.meter("billing", || with_quota(limits(0, 0, 0)));
        assert_eq!(meter.wait(QuotaKind::BytesIn), None);
    }

    #[tokio::test(start_paused = true)]
    async fn meters_without_use_are_dropped_and_overdrawn_ones_are_kept() {
        let meters = QuotaMeters::default();
        let access = with_quota(limits(1 << 20, 0, 0));
        meters.meter("billing", || access.clone()).take(QuotaKind::BytesIn, 1 << 40);
        for number in 0..100_000 {
            meters.meter(&format!("p{number}"), || access.clone());
        }
        assert!(meters.known("billing").unwrap().wait(QuotaKind::BytesIn).is_some());
        assert!(sync::lock(&meters.meters).len() < 4 * METERS_KEPT);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_are_always_admitted_do_not_shut_out_others_for_long() {
        let meter = meter(limits(0, 10, 0));
        for _ in 0..1_000 {
            meter.count_call();
        }
        assert!(meter.admit_call(None).is_err());
        tokio::time::advance(Duration::from_secs(1)).await;
        meter.admit_call(None).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn fractions_of_a_microsecond_are_not_lost() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(start);
        bucket.set(1_000_000, start);
        bucket.take(1_000_000, start);
        for step in 1..=2_000_000_u64 {
            bucket.fill(start + Duration::from_nanos(step * 500));
        }
        assert_eq!(bucket.balance, bucket.capacity());
    }

    #[tokio::test(start_paused = true)]
    async fn largest_values_do_not_overflow() {
        let now = Instant::now();
        let mut bucket = TokenBucket::new(now);
        bucket.set(1 << 40, now);
        for _ in 0..1_000 {
            bucket.take(u64::MAX, now);
        }
        assert!(bucket.wait(now).is_some_and(|wait| wait > Duration::from_secs(8)));
        let later = now + Duration::from_secs(u64::from(u32::MAX));
        bucket.fill(later);
        assert!(bucket.balance <= bucket.capacity());
    }
}
