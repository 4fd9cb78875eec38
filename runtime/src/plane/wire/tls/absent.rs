//! Replaces TLS in a build without it: refuses any TLS configuration.

use genset_backend_common::EngineError;
use tokio::net::TcpStream;

use super::WireTls;

/// Never constructed, so that nothing below ever runs.
pub(in super::super) enum TlsContext {}

impl TlsContext {
    pub(in super::super) fn try_new(_config: &WireTls) -> Result<Self, EngineError> {
        let problem = "this build has no TLS on the tcp request plane; build it with --features tls, or leave the --wire-tls flags out";
        Err(EngineError::unsupported("--wire-tls-ca", problem))
    }

    pub(in super::super) fn check_can_serve(&self) -> Result<(), EngineError> {
        match *self {}
    }

    pub(in super::super) fn asks_callers(&self) -> bool {
        match *self {}
    }

    pub(in super::super) fn accept(&self, _stream: TcpStream) -> TcpStream {
        match *self {}
    }

    #[expect(clippy::unused_async, reason = "with the feature it waits")]
    pub(in super::super) async fn connect(
        &self,
        _stream: TcpStream,
        _location: &str,
    ) -> Result<TcpStream, EngineError> {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_tls_names_the_flag() {
        let error = TlsContext::try_new(&WireTls::new("")).err().unwrap();
        assert!(error.message().contains("--features tls"), "{error}");
        assert_eq!(error.at().map(|at| at.name()), Some("--wire-tls-ca"));
    }
}
