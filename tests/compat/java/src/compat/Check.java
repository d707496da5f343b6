package compat;

import java.util.Objects;
import java.util.concurrent.Callable;

/** Assertions that need no JVM flag, unlike {@code assert}. */
final class Check {
    private static final long POLL_MS = 50;

    private Check() {}

    static void that(boolean holds, Object what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    static void equal(Object actual, Object expected, String what) {
        if (!Objects.equals(actual, expected)) {
            throw new AssertionError(what + ": " + actual + ", not " + expected);
        }
    }

    /** Require that the call fails with a cause of this kind. */
    static void fails(Class<? extends Throwable> kind, Callable<?> call, String what) {
        try {
            call.call();
        } catch (Exception | AssertionError error) {
            Throwable cause = error.getCause() == null ? error : error.getCause();
            if (!kind.isInstance(cause)) {
                throw new AssertionError(what + " failed with " + cause + ", not " + kind.getSimpleName(), error);
            }
            return;
        }
        throw new AssertionError(what + " did not fail; due was " + kind.getSimpleName());
    }

    /** Evaluate the condition again and again until it is true. Fail if that takes longer than `seconds`. */
    static void eventually(Callable<Boolean> condition, String what, double seconds) throws Exception {
        long deadline = System.nanoTime() + (long) (seconds * 1e9);
        while (!condition.call()) {
            if (System.nanoTime() > deadline) {
                throw new AssertionError(what + ": not within " + seconds + " s");
            }
            Thread.sleep(POLL_MS);
        }
    }

    static void eventually(Callable<Boolean> condition, String what) throws Exception {
        eventually(condition, what, 20);
    }
}
