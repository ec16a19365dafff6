//! Timing of seals.

use super::*;

#[tokio::test(start_paused = true)]
async fn seal_is_timed_for_each_split() {
    let mut seal = SealWatch::default();
    assert_eq!(seal.sealed_for(3), Duration::ZERO);
    tokio::time::advance(Duration::from_secs(7)).await;
    assert_eq!(seal.sealed_for(3), Duration::from_secs(7));
    assert_eq!(seal.sealed_for(4), Duration::ZERO);
}
