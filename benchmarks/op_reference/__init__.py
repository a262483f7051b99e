"""What the op reference page is written from: ops run one by one."""
