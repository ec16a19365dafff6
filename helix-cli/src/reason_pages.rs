//! Explanations of all reasons, for `helix explain`, the manual and completion.
//! The texts are in `reasons`; gRPC codes and retry flags come from helix-proto.

use helix_proto::error as wire;
use helix_proto::log::v1::{ErrorReason, HealthReason};
use schemars::JsonSchema;
use serde::Serialize;

use crate::reasons::{self, ReasonText};
use crate::report;

/// Upper bound of the enum numbers of reasons.
const REASONS_MAX: i32 = 1000;

/// The explanation of a reason.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ReasonPage {
    /// Name, as shown in brackets after an error
    reason: String,
    /// gRPC code. Null for reasons that only `helix cluster health` reports
    grpc_code: Option<String>,
    /// True if a retry of the same request may succeed
    #[schemars(extend("x-wide" = true))]
    retryable: Option<bool>,
    /// True if the request may have been applied. Null if each error states it
    #[schemars(extend("x-wide" = true))]
    may_have_applied: Option<bool>,
    /// Meaning
    meaning: &'static str,
    /// Likely cause
    #[schemars(extend("x-wide" = true))]
    why: &'static str,
    /// Commands and actions to try
    #[schemars(extend("x-wide" = true))]
    hint: &'static str,
}

/// Returns the explanations of all reasons of this version.
pub(crate) fn pages() -> Vec<ReasonPage> {
    let errors = (1..REASONS_MAX).filter_map(|number| ErrorReason::try_from(number).ok());
    let mut pages: Vec<ReasonPage> = errors.map(of_error).collect();
    let findings = (1..REASONS_MAX).filter_map(|number| HealthReason::try_from(number).ok());
    pages.extend(findings.filter_map(|reason| {
        let name = reason.as_str_name().trim_start_matches("HEALTH_REASON_");
        reasons::of_health(reason).map(|text| ReasonPage::new(name.to_owned(), text))
    }));
    let no_response = [tonic::Code::Unavailable, tonic::Code::DeadlineExceeded];
    pages.extend(no_response.map(|code| ReasonPage {
        grpc_code: Some(report::grpc_code_name(code)),
        retryable: Some(true),
        ..ReasonPage::new(report::grpc_code_name(code), reasons::of_no_response())
    }));
    pages
}

fn of_error(reason: ErrorReason) -> ReasonPage {
    let detail = wire::detail(reason);
    ReasonPage {
        grpc_code: Some(report::grpc_code_name(wire::code(reason))),
        retryable: Some(detail.retryable),
        // Depends on the request: each error states it.
        may_have_applied: Some(detail.may_have_applied)
            .filter(|_| reason != ErrorReason::StorageFailed),
        ..ReasonPage::new(wire::reason_name(reason).to_owned(), reasons::of(reason))
    }
}

impl ReasonPage {
    /// Returns the name of the reason.
    pub(crate) fn name(&self) -> &str {
        &self.reason
    }

    fn new(reason: String, ReasonText { meaning, why, hint }: ReasonText) -> Self {
        let (grpc_code, retryable, may_have_applied) = (None, None, None);
        Self { reason, grpc_code, retryable, may_have_applied, meaning, why, hint }
    }

    /// Returns the page as text.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("{}: {}\n\n  why: {}\n", self.reason, self.meaning, self.why);
        text += &format!("  try: {}\n", self.hint.replace('\n', "\n       "));
        let Some(code) = &self.grpc_code else {
            return text + "\n  reported by helix cluster health\n";
        };
        let retry = match self.retryable {
            Some(true) => "may succeed",
            _ => "fails until the cause is removed",
        };
        let applied = match self.may_have_applied {
            Some(true) => "may have been applied",
            // Earlier attempts of the same call may have failed with another reason.
            Some(false) if self.retryable == Some(true) => {
                "was not applied by this attempt; the error states whether an earlier one may have \
                 been"
            }
            Some(false) => "was not applied",
            None => "may have been applied; the error states it",
        };
        text += &format!("\n  gRPC code {code}; a retry {retry}; a write {applied}\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use helix_proto::FILE_DESCRIPTOR_SET;
    use prost_types::FileDescriptorSet;

    use super::*;

    /// Returns the value names of a proto enum without its prefix and zero value.
    fn values(name: &str, prefix: &str) -> BTreeSet<String> {
        let files: FileDescriptorSet = prost::Message::decode(FILE_DESCRIPTOR_SET).unwrap();
        let enums = files.file.iter().flat_map(|file| &file.enum_type);
        let found = enums.into_iter().find(|it| it.name() == name).unwrap();
        let names = found.value.iter().filter(|value| value.number() != 0);
        names.map(|value| value.name().trim_start_matches(prefix).to_owned()).collect()
    }

    #[test]
    fn every_reason_of_the_api_has_an_explanation() {
        let pages: BTreeSet<String> = pages().into_iter().map(|page| page.reason).collect();
        let errors = values("ErrorReason", "ERROR_REASON_");
        assert!(errors.len() > 30, "{errors:?}");
        assert_eq!(errors.difference(&pages).collect::<Vec<_>>(), Vec::<&String>::new());
        let health = values("HealthReason", "HEALTH_REASON_");
        assert_eq!(health.difference(&pages).collect::<Vec<_>>(), Vec::<&String>::new());
    }

    #[test]
    fn explanations_are_complete_and_distinct() {
        let pages = pages();
        for page in &pages {
            for part in [page.meaning, page.why, page.hint] {
                assert!(part.len() > 8, "{page:?}");
            }
            assert!(page.text().contains("\n  try: "), "{page:?}");
        }
        let explained = pages.iter().filter(|page| page.reason != "DEADLINE_EXCEEDED");
        let meanings: BTreeSet<_> = explained.clone().map(|page| page.meaning).collect();
        assert_eq!(meanings.len(), explained.count());
    }
}
