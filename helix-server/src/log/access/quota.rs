//! Quotas: limits of a principal on each node.

use super::is_principal_name;
pub use crate::records::QuotaLimits;

/// Name that stands for every principal without a quota of its own.
pub const EVERY_PRINCIPAL: &str = "*";

/// Smallest limit of bytes per second: a large batch delays its stream for minutes at most.
pub const QUOTA_BYTES_MIN: u64 = 64 << 10;

/// Largest limit of bytes per second.
pub(super) const QUOTA_BYTES_MAX: u64 = 1 << 40;

/// Largest limit of calls per second.
pub(super) const QUOTA_REQUESTS_MAX: u64 = 1 << 30;

impl QuotaLimits {
    /// Returns whether no limit is set.
    pub fn is_unlimited(&self) -> bool {
        let Self { principal: _, bytes_in_per_second, bytes_out_per_second, .. } = self;
        let bytes = bytes_in_per_second | bytes_out_per_second;
        bytes == 0 && self.requests_per_second == 0 && self.connections == 0
    }

    /// Checks the fields.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        if self.principal != EVERY_PRINCIPAL && !is_principal_name(&self.principal) {
            let what = "must be a principal, or `*` for all without a quota".to_owned();
            return Err(("quota.principal", what));
        }
        let bytes = [
            ("quota.bytes_in_per_second", self.bytes_in_per_second),
            ("quota.bytes_out_per_second", self.bytes_out_per_second),
        ];
        for (field, value) in bytes {
            if value != 0 && !(QUOTA_BYTES_MIN..=QUOTA_BYTES_MAX).contains(&value) {
                let what = format!(
                    "{value} is out of range {QUOTA_BYTES_MIN}..={QUOTA_BYTES_MAX}; 0 is no limit"
                );
                return Err((field, what));
            }
        }
        if self.requests_per_second > QUOTA_REQUESTS_MAX {
            let what = format!("must be at most {QUOTA_REQUESTS_MAX}; 0 is no limit");
            return Err(("quota.requests_per_second", what));
        }
        Ok(())
    }
}
