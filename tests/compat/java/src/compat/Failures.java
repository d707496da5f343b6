package compat;

import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;

/** Errors that ended members and feeds before they were told to stop. */
final class Failures {
    private final List<String> messages = new CopyOnWriteArrayList<>();

    void add(String message) {
        messages.add(message);
    }

    List<String> all() {
        return messages;
    }

    void check() {
        if (!messages.isEmpty()) {
            throw new AssertionError(String.join("; ", messages));
        }
    }
}
