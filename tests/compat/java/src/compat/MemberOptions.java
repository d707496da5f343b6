package compat;

import java.util.List;
import java.util.regex.Pattern;

/**
 * Options of a member. `pattern` replaces `topics`. Without `assignors` the client uses its default list. {@link
 * #SERVER_SIDE} or {@link #UNIFORM} as the only assignor selects the consumer protocol (KIP-848).
 *
 * <p>With `commit` "auto", the client auto-commits. With "revoke", offsets are committed only in the revoke callback,
 * and with "each" after every record. With "late", the offsets of all processed records are committed some time after
 * partitions were revoked.
 */
record MemberOptions(
        String name,
        String group,
        List<String> topics,
        Pattern pattern,
        List<String> assignors,
        String instanceId,
        String commit,
        int sessionTimeoutMs,
        int maxPollIntervalMs) {

    static final String SERVER_SIDE = "consumer";

    MemberOptions(String name, String group) {
        this(name, group, List.of(), null, List.of(), null, "auto", Clients.SESSION_TIMEOUT_MS, 60_000);
    }

    /**
     * The name by which the suites of several languages select the coordinator's uniform assignor. A Java member then
     * uses the consumer protocol (KIP-848), and leaves the choice of the assignor to the coordinator.
     */
    static final String UNIFORM = "uniform";

    boolean isServerSide() {
        return assignors.equals(List.of(SERVER_SIDE)) || assignors.equals(List.of(UNIFORM));
    }

    /**
     * Return whether the revoke callback commits. In an incremental rebalance the client auto-commits some time before
     * the revocation, and misses the records that are processed in between. So a member that must not receive a record
     * twice also commits in the callback.
     */
    boolean commitsWhenRevoked() {
        boolean incremental = assignors.equals(List.of("cooperative-sticky")) || isServerSide();
        return commit.equals("revoke") || commit.equals("auto") && incremental;
    }

    MemberOptions topics(String... names) {
        return with(List.of(names), pattern, assignors, instanceId, commit, sessionTimeoutMs, maxPollIntervalMs);
    }

    MemberOptions pattern(String expression) {
        Pattern compiled = Pattern.compile(expression);
        return with(topics, compiled, assignors, instanceId, commit, sessionTimeoutMs, maxPollIntervalMs);
    }

    MemberOptions assignors(String... names) {
        return with(topics, pattern, List.of(names), instanceId, commit, sessionTimeoutMs, maxPollIntervalMs);
    }

    MemberOptions instance(String id, int sessionMs) {
        return with(topics, pattern, assignors, id, commit, sessionMs, maxPollIntervalMs);
    }

    /** Set the session timeout of a classic member. In the consumer protocol, the coordinator decides the timeout. */
    MemberOptions session(int milliseconds) {
        return with(topics, pattern, assignors, instanceId, commit, milliseconds, maxPollIntervalMs);
    }

    MemberOptions commit(String mode) {
        return with(topics, pattern, assignors, instanceId, mode, sessionTimeoutMs, maxPollIntervalMs);
    }

    MemberOptions maxPollInterval(int milliseconds) {
        return with(topics, pattern, assignors, instanceId, commit, sessionTimeoutMs, milliseconds);
    }

    private MemberOptions with(
            List<String> newTopics,
            Pattern newPattern,
            List<String> newAssignors,
            String newInstanceId,
            String newCommit,
            int newSessionMs,
            int newMaxPollMs) {
        return new MemberOptions(
                name,
                group,
                newTopics,
                newPattern,
                newAssignors,
                newInstanceId,
                newCommit,
                newSessionMs,
                newMaxPollMs);
    }
}
