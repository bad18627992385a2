"""The conformance suite: any engine against the rules, by ``pytest --pyargs hybridkv_ref.conformance``.

    pytest --pyargs hybridkv_ref.conformance --hybridkv-engine mypkg:make_engine --hybridkv-report DIR

``engine`` says what an engine implements, ``plugin`` the options, ``run`` what a run does and finds.  Importing this
package imports nothing else: the pytest plugin is loaded in every run of pytest.
"""
